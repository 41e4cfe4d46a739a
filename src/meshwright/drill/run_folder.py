"""What a run has left on disk: its losses and checkpoints, compared with what they must be."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.checkpoint.check import check_checkpoints
from meshwright.checkpoint.reader import FOLDER, CheckpointReader
from meshwright.tracking.run_files import read_lines


class NotSurvived(Exception):
    """The outcome of a fault is not the expected one; the message says what is wrong."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a drilled run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / FOLDER

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        return CheckpointReader(self.checkpoints).steps()

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the run: its mesh, its precision and more."""
        return yaml.safe_load((self.path / "plan.yaml").read_text(encoding="utf-8"))

    def losses(self) -> list[tuple[int, float]]:
        """Return the loss of every step, in the order in which they were written."""
        rows = self._rows("metrics")
        return [(row["step"], row["loss"]) for row in rows if row["split"] == "train"]

    def step_seconds(self) -> float:
        """Return the time of a step."""
        seconds = [row["step_seconds"] for row in self._rows("metrics") if "step_seconds" in row]
        return statistics.median(seconds) if seconds else 0.0

    def save_seconds(self) -> float:
        """Return the time of a save."""
        saves = [row["seconds"] for row in self._rows("events") if row["kind"] == "checkpoint"]
        return statistics.median(saves) if saves else 0.0

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return list(read_lines(self.path / f"{name}.jsonl"))

    def copy_until(self, step: int, folder: Path) -> None:
        """Copy the run as it was after the checkpoint of a step."""
        shutil.copytree(self.path, folder)
        copy = RunFolder(folder)
        for later in [each for each in copy.steps if each > step]:
            shutil.rmtree(copy.checkpoints / str(later))
        for name in ("metrics", "events"):
            rows = [row for row in copy._rows(name) if row["step"] <= step]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / "result.json").unlink(missing_ok=True)

    def check_checkpoints(self, committed: Collection[int] = ()) -> None:
        """Raise if a checkpoint that is listed is not whole, or if a committed one is gone."""
        if lost := sorted(set(committed) - set(self.steps)):
            raise NotSurvived(f"the committed checkpoint of step {lost[0]} is gone")
        for checked in check_checkpoints(self.checkpoints):
            if checked.verdict == "damaged":
                raise NotSurvived(f"checkpoint {checked.step} is listed, but {checked.problem}")

    def check_swept(self) -> None:
        """Raise if something partial has been left in the folder of checkpoints."""
        for path in self.checkpoints.iterdir():
            if path.is_dir() and not path.name.isdecimal() and not path.name.endswith(".damaged"):
                raise NotSurvived(f"{path.name} is left in {FOLDER}/")

    def check_same(self, other: RunFolder) -> None:
        """Raise unless every loss and the final state equal those of another run, bit for bit."""
        expected = self._expected(other)
        for step, loss in self.losses():
            if loss != expected.get(step):
                raise NotSurvived(
                    f"the loss of step {step} is {loss!r} instead of {expected.get(step)!r}"
                )
        own, its = (_final_checksums(each) for each in (self, other))
        if different := sorted(name for name in its if own.get(name) != its[name]):
            raise NotSurvived(f"the losses are equal, but {different[0]} is not at the end")

    def difference(self, other: RunFolder) -> float:
        """Return the largest relative difference of losses; raise if steps are missing."""
        expected, found = self._expected(other), dict(self.losses())
        return max(
            abs(found[step] - loss) / max(abs(loss), 1e-30) for step, loss in expected.items()
        )

    def _expected(self, other: RunFolder) -> dict[int, float]:
        """Return the losses of another run; raise if this one has not done all of its steps."""
        expected = dict(other.losses())
        if missing := sorted(set(expected) - set(dict(self.losses()))):
            raise NotSurvived(f"step {missing[0]} was not done")
        return expected


def _final_checksums(run: RunFolder) -> dict[str, Any]:
    """Return the checksum of every array of the last checkpoint."""
    checksums = CheckpointReader(run.checkpoints).checksums(run.steps[-1])
    return {} if checksums is None else dict(checksums.arrays)
