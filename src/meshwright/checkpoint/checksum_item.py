"""The checksums of a checkpoint as one of its items: each process writes those of its shards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from meshwright.checkpoint.checksums import ArraySum, ArraySums, json_checksum, merge_sums, sums_of

CHECKSUMS = "checksums"
"""Name of the item on disk."""


@dataclass(frozen=True)
class Checksums:
    """The checksums of the arrays, by group and path, and of the metadata."""

    arrays: ArraySums
    metadata: int
    loss: float | None

    def difference(self, arrays: ArraySums) -> str:
        """Return the first array that is not what was saved; empty if all are."""
        for name, own in arrays.items():
            saved = self.arrays.get(name)
            if saved is None:
                return f"array `{name}` was not saved"
            if saved != own:
                return f"array `{name}` differs from what was saved: {_difference(saved, own)}"
        return ""


class ChecksumHandler(ocp.AsyncCheckpointHandler):
    """Writes checksums while Orbax writes the arrays; the main process that of the metadata."""

    def __init__(self, process: int, *, main: bool) -> None:
        self._process, self._main = process, main
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    async def async_save(self, directory: epath.Path, args: ChecksumSave) -> list[Any]:
        """Start to compute and write the checksums."""
        return [self._thread.submit(self._write, Path(directory), args)]

    def save(self, directory: epath.Path, args: ChecksumSave) -> None:
        """Compute and write the checksums."""
        self._write(Path(directory), args)

    def restore(self, directory: epath.Path, args: ChecksumRestore | None = None) -> Checksums:
        """Read the checksums."""
        return read_checksums(Path(directory))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _write(self, directory: Path, args: ChecksumSave) -> None:
        sums = sums_of(args.state, main=self._main)
        content = {
            "arrays": {name: own.to_json() for name, own in sums.items()},
            "metadata": json_checksum(args.metadata) if self._main else None,
            "loss": args.loss,
        }
        text = json.dumps({"checksum": json_checksum(content), "content": content})
        (directory / f"process_{self._process}.json").write_text(text, encoding="utf-8")


@ocp.args.register_with_handler(ChecksumHandler, for_save=True)
@dataclass
class ChecksumSave(ocp.args.CheckpointArgs):
    """What to compute checksums of: the arrays by group and path, and the metadata."""

    state: Mapping[str, Mapping[str, Any]]
    metadata: Mapping[str, Any]
    loss: float | None


@ocp.args.register_with_handler(ChecksumHandler, for_restore=True)
@dataclass
class ChecksumRestore(ocp.args.CheckpointArgs):
    """Asks for the checksums."""


def read_checksums(directory: Path) -> Checksums:
    """Read the checksums of all processes; raise ValueError if they are incomplete."""
    parts: list[ArraySums] = []
    metadata: int | None = None
    loss: float | None = None
    for file in sorted(directory.glob("process_*.json")):
        outer = json.loads(file.read_text(encoding="utf-8"))
        content = outer["content"]
        if outer["checksum"] != json_checksum(content):
            raise ValueError(f"{file.name} differs from what was saved")
        parts.append({name: ArraySum.from_json(own) for name, own in content["arrays"].items()})
        metadata = content["metadata"] if metadata is None else metadata
        loss = content["loss"]
    arrays = merge_sums(parts)
    if metadata is None:
        raise ValueError("the checksums of the main process are missing")
    for name, own in arrays.items():
        if not own.complete:
            raise ValueError(
                f"the checksum of `{name}` covers {own.elements} of {math.prod(own.shape)} "
                "elements: that of a process is missing"
            )
    return Checksums(arrays, metadata, loss)


def _difference(saved: ArraySum, own: ArraySum) -> str:
    if (saved.shape, saved.dtype) != (own.shape, own.dtype):
        return f"{saved.dtype}{list(saved.shape)} was saved, {own.dtype}{list(own.shape)} was read"
    return f"its checksum was {saved.total:016x} and is {own.total:016x}"
