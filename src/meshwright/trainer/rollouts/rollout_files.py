"""The files of rollouts: completions and rewards as JSON lines, and the batch in use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.protocols import HostBatch
from meshwright.errors import UserError
from meshwright.processes import broadcast, is_main
from meshwright.text.json_text import write_atomically
from meshwright.tracking.run_files import read_lines
from meshwright.trainer.run_dir import write_arrays

FOLDER = "completions"
KEPT = 8
"""Batches that are kept for resuming inside a rollout."""


class RolloutFiles:
    """Writes what rollouts give into the run folder before a step reads it.

    Args:
        run_dir: the run folder; None writes nothing.
        run: identifies the run; what another one wrote there is not read.
        rewards: the names of the rewards.
    """

    def __init__(self, run_dir: Path | None, run: str, rewards: Sequence[str]) -> None:
        self._folder = None if run_dir is None else run_dir / FOLDER
        self._run, self._rewards = run, list(rewards)

    def rewards(self, number: int, tokens: Sequence[Sequence[int]]) -> Any:
        """Return the rewards that an earlier attempt gave these very completions; None if none.

        A reward may depend on a clock, so it is asked once only.
        """
        return broadcast(self._stored(number, tokens) if is_main() else None)

    def write(self, number: int, lines: Sequence[Mapping[str, Any]], tokens: Any) -> None:
        """Write the completions of a rollout, each with its rewards."""
        if self._folder is None or not is_main():
            return
        self._folder.mkdir(exist_ok=True)
        texts = [
            json.dumps({**line, "run": self._run, "digest": digest(own)}, ensure_ascii=False)
            for line, own in zip(lines, tokens, strict=True)
        ]
        write_atomically(self._path(number, "jsonl"), "\n".join(texts) + "\n")

    def keep(self, number: int, batch: HostBatch) -> None:
        """Keep a batch that several steps use."""
        if self._folder is None or not is_main():
            return
        write_arrays(self._path(number, "npz"), batch)
        self._path(number - KEPT, "npz").unlink(missing_ok=True)

    def kept(self, number: int, num_iterations: int) -> HostBatch:
        """Return a batch that was kept."""
        path = None if self._folder is None else self._path(number, "npz")
        if path is None or not path.is_file():
            raise UserError(
                f"step {number * num_iterations + 1} began a rollout that is not there any more",
                why=f"{path or 'the run has no folder'}: its completions are those of an earlier "
                "model, and cannot be made again",
                fix=f"resume from a checkpoint whose step is a multiple of {num_iterations}",
            )
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def _stored(self, number: int, tokens: Sequence[Sequence[int]]) -> list[list[float]] | None:
        if self._folder is None:
            return None
        lines = list(read_lines(self._path(number, "jsonl")))
        found = [(line.get("run"), line.get("digest")) for line in lines]
        if found != [(self._run, digest(own)) for own in tokens]:
            return None
        stored = [line.get("rewards", {}) for line in lines]
        if any(list(each) != self._rewards for each in stored):
            return None
        # A lost reward is null in JSON, and NaN here.
        return [[float("nan") if v is None else v for v in each.values()] for each in stored]

    def _path(self, number: int, ending: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:06}.{ending}"


def digest(tokens: Sequence[int]) -> str:
    """Return a short text that tells completions apart."""
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()[:16]
