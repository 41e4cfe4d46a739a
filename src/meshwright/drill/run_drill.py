"""Running a drill: first without a fault, then once for each fault, with a result for each."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.drill import file_faults, joining_faults, process_faults
from meshwright.drill.launched import NotSurvived
from meshwright.drill.trial import Configuration, Fault, Trial
from meshwright.errors import UserError
from meshwright.text.masking import mask_words
from meshwright.text.units import human_seconds

Verdict = Literal["passed", "failed", "not applicable"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (*process_faults.FAULTS, *file_faults.FAULTS, *joining_faults.FAULTS)
}
"""All faults by name, in the order in which a drill injects them."""


@dataclass(frozen=True)
class FaultResult:
    """What happened after a fault, or why it does not apply, and if that was as expected."""

    fault: str
    happened: str
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class DrillReport:
    """The results of a drill."""

    mesh: dict[str, int]
    processes: int
    steps: int
    rows: tuple[FaultResult, ...]
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The names of the faults that the run did not recover from as expected."""
        return [row.fault for row in self.rows if row.verdict == "failed"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"passed": not self.failed, **asdict(self)}


def run_drill(
    configuration: Configuration,
    faults: Sequence[Fault],
    folder: Path,
    show_progress: Callable[[str], None],
    show_result: Callable[[FaultResult], None],
) -> DrillReport:
    """Run the configuration without a fault, which must work, then inject each into a new run."""
    started = time.monotonic()
    show_progress("without a fault")
    first = _run_without_fault(configuration, folder / "reference")
    left = _TimeLeft(first.seconds, faults)
    rows: list[FaultResult] = []
    for number, fault in enumerate(faults, 1):
        show_progress(f"{number} of {len(faults)}: {fault.name}, about {left} left")
        result = _inject(fault, replace(first, folder=folder / fault.name, fault=fault.name))
        left.done(fault, result.seconds)
        rows.append(result)
        show_result(result)
    return DrillReport(
        first.reference.plan["mesh"],
        configuration.nprocs,
        configuration.steps,
        tuple(rows),
        time.monotonic() - started,
    )


def _run_without_fault(configuration: Configuration, folder: Path) -> Trial:
    """Return a trial without a fault, which has to succeed."""
    started, trial = time.monotonic(), Trial(configuration, folder)
    try:
        launched = trial.train()
    except NotSurvived as problem:
        raise _fails_anyway(configuration, str(problem)) from None
    if launched.code:
        raise _fails_anyway(configuration, launched.message())
    done = len(trial.run.losses())
    if done != configuration.steps:
        raise UserError(
            f"the run ends after {done} steps, and a drill takes {configuration.steps}",
            fix="use more data, or a smaller batch",
        )
    seconds = time.monotonic() - started
    return replace(trial, baseline=trial.run, seconds=seconds, batch_dtypes=launched.batch_dtypes)


def _fails_anyway(configuration: Configuration, why: str) -> UserError:
    words = ["launch", f"--nprocs={configuration.nprocs}", "--", "train", *configuration.words]
    return UserError(
        "this configuration fails without any fault",
        why=why,
        fix=f"fix that first; all of its output: {shlex.join(['meshwright', *mask_words(words)])}",
    )


def _inject(fault: Fault, trial: Trial) -> FaultResult:
    started = time.monotonic()
    why_not = fault.why_not(trial)
    if why_not:
        return FaultResult(fault.name, why_not, "not applicable", 0.0)
    trial.folder.mkdir()
    verdict: Verdict = "passed"
    try:
        happened = fault.check(trial)
    except NotSurvived as problem:
        happened, verdict = str(problem), "failed"
    return FaultResult(fault.name, happened, verdict, time.monotonic() - started)


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
