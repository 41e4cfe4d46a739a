"""Checking whole checkpoints: every array is read and compared with its checksum."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.damage import DamagedCheckpoint, list_set_aside
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.runtime.activity import activity

READ_ELEMENTS = 2**27
"""Elements that are read at a time, so that a checkpoint need not fit into memory."""

Verdict = Literal["sound", "damaged", "set aside"]


@dataclass(frozen=True)
class Checked:
    """The result of checking a checkpoint, of which so many arrays and bytes were read.

    The verdict is sound, damaged, or set aside by a run that found it damaged.
    """

    step: int
    arrays: int
    bytes: int
    verdict: Verdict
    problem: str = ""

    @property
    def damaged(self) -> bool:
        """Whether the checkpoint cannot be used."""
        return self.verdict in ("damaged", "set aside")


def check_checkpoints(folder: Path, step: int | None = None) -> list[Checked]:
    """Check the checkpoints in a folder, oldest first, or a single one."""
    reader = CheckpointReader(folder)
    if step is not None:
        return [check_checkpoint(reader, step)]
    checked = [check_checkpoint(reader, each) for each in reader.steps()]
    for path in list_set_aside(folder):
        number = int(path.name.partition(".")[0])
        problem = f"it was found damaged before and renamed to {path.name}"
        checked.append(Checked(number, 0, 0, "set aside", problem))
    return sorted(checked, key=lambda each: each.step)


def check_checkpoint(reader: CheckpointReader, step: int) -> Checked:
    """Read everything in a checkpoint and compare it with what was saved."""
    arrays = size = 0
    try:
        with activity(f"reading step {step}"):
            for batch in _batches(reader.shapes(step)):
                for by_path in reader.read(step, batch).values():
                    arrays += len(by_path)
                    size += sum(array.nbytes for array in by_path.values())
    except DamagedCheckpoint as error:
        return Checked(step, arrays, size, "damaged", error.damage.problem)
    return Checked(step, arrays, size, "sound")


def _batches(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Iterator[dict[str, list[str]]]:
    """Yield the paths of arrays to read at a time, by group."""
    batch: dict[str, list[str]] = {}
    elements = 0
    for group, by_path in shapes.items():
        for path, shape in by_path.items():
            if batch and elements + math.prod(shape) > READ_ELEMENTS:
                yield batch
                batch, elements = {}, 0
            batch.setdefault(group, []).append(path)
            elements += math.prod(shape)
    if batch:
        yield batch
