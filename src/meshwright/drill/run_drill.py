"""Running a drill: the training without a fault, then every fault, and a row for each."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.drill.configuration import Configuration
from meshwright.drill.fault import Fault, Missed
from meshwright.drill.scene import Scene
from meshwright.errors import UserError
from meshwright.text.masking import mask_words
from meshwright.text.units import human_seconds

Verdict = Literal["passed", "failed", "not applicable"]
Tell = Callable[[str], None]
"""Takes how far the drill is, as text."""


@dataclass(frozen=True)
class Row:
    """What came of one fault.

    Attributes:
        fault: its name.
        happened: what happened, or why nothing could.
        verdict: whether that is what had to happen.
        seconds: how long it took.
    """

    fault: str
    happened: str
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class Report:
    """What came of a drill.

    Attributes:
        mesh: the size of each axis of the mesh.
        processes: the number of processes.
        steps: updates of each training.
        rows: what came of each fault.
        seconds: how long all of it took.
    """

    mesh: dict[str, int]
    processes: int
    steps: int
    rows: tuple[Row, ...]
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The names of the faults that were not survived as they have to be."""
        return [row.fault for row in self.rows if row.verdict == "failed"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"passed": not self.failed, **asdict(self)}


def run_drill(
    configuration: Configuration,
    faults: Sequence[Fault],
    folder: Path,
    tell: Tell,
    show: Callable[[Row], None],
) -> Report:
    """Train without a fault, then let each of the faults happen.

    Args:
        configuration: what is trained.
        faults: what happens to it.
        folder: an empty folder, for a folder of each fault.
        tell: takes how far the drill is.
        show: takes each row when it is known.

    Raises:
        UserError: the training fails without any fault.
    """
    started = time.monotonic()
    tell("without a fault")
    first = _train_undisturbed(configuration, folder / "reference")
    left = _TimeLeft(first.seconds, faults)
    rows: list[Row] = []
    for number, fault in enumerate(faults, 1):
        tell(f"{number} of {len(faults)}: {fault.name}, about {left} left")
        scene = replace(first, folder=folder / fault.name, fault=fault.name)
        row = _drill(fault, scene)
        left.done(fault, row.seconds)
        rows.append(row)
        show(row)
    return Report(
        first.undisturbed.plan["mesh"],
        configuration.nprocs,
        configuration.steps,
        tuple(rows),
        time.monotonic() - started,
    )


def _train_undisturbed(configuration: Configuration, folder: Path) -> Scene:
    """Return a scene with the reference, which has to end well."""
    started, scene = time.monotonic(), Scene(configuration, folder)
    try:
        launched = scene.train()
    except Missed as missed:
        raise _fails_anyway(configuration, str(missed)) from None
    if launched.code:
        raise _fails_anyway(configuration, launched.message())
    done = len(scene.run.losses())
    if done != configuration.steps:
        raise UserError(
            f"the training ends after {done} updates, and a drill takes {configuration.steps}",
            fix="use more data, or a smaller batch",
        )
    seconds = time.monotonic() - started
    return replace(scene, reference=scene.run, seconds=seconds, batch_kinds=launched.batch_kinds)


def _fails_anyway(configuration: Configuration, why: str) -> UserError:
    words = ["launch", f"--nprocs={configuration.nprocs}", "--", "train", *configuration.words]
    return UserError(
        "this configuration fails without any fault",
        why=why,
        fix=f"mend it first; all of its output: {shlex.join(['meshwright', *mask_words(words)])}",
    )


def _drill(fault: Fault, scene: Scene) -> Row:
    started = time.monotonic()
    why_not = fault.why_not(scene)
    if why_not:
        return Row(fault.name, why_not, "not applicable", 0.0)
    scene.folder.mkdir()
    verdict: Verdict = "passed"
    try:
        happened = fault.play(scene)
    except Missed as missed:
        happened, verdict = str(missed), "failed"
    return Row(fault.name, happened, verdict, time.monotonic() - started)


class _TimeLeft:
    """An estimate of the time left, from what the faults so far have taken."""

    def __init__(self, seconds: float, faults: Sequence[Fault]) -> None:
        self._seconds, self._starts = seconds, 1.0
        self._left = sum(fault.starts for fault in faults)

    def done(self, fault: Fault, seconds: float) -> None:
        """Count a fault that is over."""
        self._left -= fault.starts
        if seconds:
            self._seconds, self._starts = self._seconds + seconds, self._starts + fault.starts

    def __str__(self) -> str:
        return human_seconds(self._left * self._seconds / self._starts)
