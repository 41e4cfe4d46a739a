"""The files of rollouts: completions and rewards as JSON lines, and the batch in use."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint import FOLDER as CHECKPOINTS
from meshwright.data.protocols import HostBatch
from meshwright.errors import UserError
from meshwright.processes import broadcast, is_main
from meshwright.text.json_text import write_atomically
from meshwright.tracking.run_files import read_lines
from meshwright.trainer.run_dir import write_arrays

FOLDER = "completions"
KEPT = 8
"""Batches that are kept for resuming inside a rollout, besides those that checkpoints need."""


class RolloutFiles:
    """Writes what rollouts give into the run folder before a step reads it.

    Args:
        run_dir: the run folder; None writes nothing.
        run: identifies the run; what another one wrote there is not read.
        rewards: the names of the rewards.
        num_iterations: steps of each rollout.
        resumed: the folder of the run whose checkpoint is resumed from.
    """

    def __init__(
        self,
        run_dir: Path | None,
        run: str,
        rewards: Sequence[str],
        num_iterations: int,
        resumed: Path | None = None,
    ) -> None:
        self._folder = None if run_dir is None else run_dir / FOLDER
        self._run, self._rewards = run, list(rewards)
        self._each, self._resumed = num_iterations, resumed

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
            json.dumps({**line, **self._facts(number, own)}, ensure_ascii=False)
            for line, own in zip(lines, tokens, strict=True)
        ]
        write_atomically(self._path(self._folder, number, "jsonl"), "\n".join(texts) + "\n")

    def keep(self, number: int, batch: HostBatch) -> None:
        """Keep a batch that several steps use."""
        if self._folder is None or not is_main():
            return
        write_arrays(self._path(self._folder, number, "npz"), batch)
        saved = self._folder.with_name(CHECKPOINTS).glob("[0-9]*")
        needed = {int(path.name) // self._each for path in saved if path.name.isdigit()}
        needed.update(range(number - KEPT + 1, number + 1))
        named = {self._path(self._folder, each, "npz") for each in needed}
        for path in set(self._folder.glob("*.npz")) - named:
            path.unlink(missing_ok=True)

    def kept(self, number: int) -> HostBatch:
        """Return a batch that was kept, by this run or the one that it continues."""
        places = [self._folder, self._resumed and self._resumed / FOLDER]
        paths = [self._path(folder, number, "npz") for folder in places if folder is not None]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UserError(
                f"step {number * self._each + 1} began a rollout that is not there any more",
                why=f"{paths[-1] if paths else 'the run has no folder'}: its completions are those "
                "of an earlier model, and cannot be made again",
                fix=f"resume from a checkpoint whose step is a multiple of {self._each}",
            )
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def _stored(self, number: int, tokens: Sequence[Sequence[int]]) -> list[list[float]] | None:
        if self._folder is None:
            return None
        lines = list(read_lines(self._path(self._folder, number, "jsonl")))
        found = [(line.get("run"), line.get("digest")) for line in lines]
        if found != [(self._run, digest(own)) for own in tokens]:
            return None
        stored = [line.get("rewards", {}) for line in lines]
        if any(list(each) != self._rewards for each in stored):
            return None
        # A lost reward is null in JSON, and NaN here.
        return [[float("nan") if v is None else v for v in each.values()] for each in stored]

    def _path(self, folder: Path, number: int, ending: str) -> Path:
        """Return the file of a rollout, which is named by the first step that it serves."""
        return folder / f"{number * self._each + 1:06}.{ending}"

    def _facts(self, number: int, tokens: Sequence[int]) -> dict[str, Any]:
        first = number * self._each + 1
        steps = [first, first + self._each - 1]
        return {"run": self._run, "steps": steps, "digest": digest(tokens)}


def rollout_missing(run_dir: Path, step: int) -> str:
    """Say which batch a resume after a step would need and not find; empty if none."""
    for path in sorted((run_dir / FOLDER).glob("*.jsonl"), reverse=True):
        first, last = next(iter(read_lines(path)), {}).get("steps", (0, 0))
        if first <= step:
            kept = path.with_suffix(".npz")
            inside = step < last and not kept.is_file()
            return f"its rollout is in use until step {last}, and {kept} is missing" * inside
    return ""


def digest(tokens: Sequence[int]) -> str:
    """Return a short text that tells completions apart."""
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()[:16]
