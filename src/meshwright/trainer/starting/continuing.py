"""Continuing a run in memory: a second `fit` of a trainer, without compiling again."""

from dataclasses import dataclass, field
from typing import Any

import jax

from meshwright.data.batches import form_of
from meshwright.data.initial_fields import Table
from meshwright.errors import ExitCode, UserError
from meshwright.plan import Plan
from meshwright.runtime.interrupt import PREEMPTIONS, stop_text
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState, copied
from meshwright.trainer.programs import Programs
from meshwright.trainer.run_progress import Stop, StopReason
from meshwright.trainer.starting.resume import (
    ResumePoint,
    check_fits,
    first_difference,
    restore,
    shapes_of,
)
from meshwright.trainer.trained.fit_result import FitResult


@dataclass
class Memory:
    """What a trainer remembers from one `fit` to the next: data as given and as read.

    Plans are kept by samples per batch, and what the initial model computed by fingerprint.
    """

    result: FitResult | None = None
    data: tuple[Any, Any] | None = None
    plans: dict[int, Plan] = field(default_factory=dict[int, Plan])
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    _programs: tuple[tuple[Any, ...], Programs] | None = None

    def programs(self, settings: tuple[Any, ...], batch: Any) -> Programs | None:
        """Return the programs of the last `fit` if it had these settings and such batches."""
        if self._programs is None:
            return None
        (form, *before), programs = self._programs
        same = len(before) == len(settings) and all(
            a is b for a, b in zip(before, settings, strict=True)
        )
        return programs if same and form == form_of(batch) else None

    def keep_programs(self, settings: tuple[Any, ...], batch: Any, programs: Programs) -> Programs:
        """Remember the programs of a `fit`, and return them."""
        self._programs = ((form_of(batch), *settings), programs)
        return programs


def continued_state(result: FitResult, programs: Programs) -> TrainState:
    """Return a copy of a result's state for a step, which may have batches of another size.

    It is a copy because the step donates its state, and the result keeps its own.
    """
    if result.assembled is programs.assembled:
        return copied(result.state)
    before, after = result.programs.form, programs.form
    _check_same(before, after)
    shardings = jax.tree.map(lambda struct: struct.sharding, after.structs)
    base = {path: struct.sharding for path, struct in after.base_structs.items()}
    return after.state(
        jax.device_put(before.copy(result.state), shardings),
        jax.device_put(before.base_arrays(result.state), base),
    )


def restored_result(point: ResumePoint, programs: Programs) -> FitResult:
    """Return the state of a checkpoint as the result of its run."""
    check_fits(point, programs.form)
    return FitResult(
        losses={},
        eval={},
        steps=point.step,
        seconds=0.0,
        stop=Stop(StopReason.RESTORED, f"restored from {point.path}"),
        state=restore(point, programs.form),
        programs=programs,
        metadata=point.metadata,
    )


def choose_start(
    point: ResumePoint | None, result: FitResult | None, resume: str
) -> tuple[ResumePoint | None, FitResult | None]:
    """Return what a `fit` starts from: a checkpoint, the last result, or neither.

    Any ``resume`` but ``auto`` asks for the checkpoint.
    """
    if point is None or result is None or resume != "auto" or point.step == result.steps:
        return point, None if point is not None else result
    raise UserError(
        "it is not clear where to continue",
        why=f"this trainer has done {result.steps} steps, and the newest checkpoint in the "
        f"run folder is of step {point.step}",
        fix='write resume="must" for the checkpoint, or another run_dir for what the trainer has '
        "in memory",
    )


def raise_interrupted(result: FitResult) -> None:
    """Raise what the signal asks for that ended a run; do nothing if none did."""
    if not result.interrupted:
        return
    if result.stopped in map(stop_text, PREEMPTIONS):
        raise SystemExit(ExitCode.PREEMPTED)
    where = "in memory" if result.run_dir is None else f"in {result.run_dir}"
    raise KeyboardInterrupt(
        f"stopped after step {result.steps}; its state is {where}, and fit continues from it"
    )


def _check_same(before: CanonicalForm, after: CanonicalForm) -> None:
    if found := first_difference(shapes_of(before), shapes_of(after)):
        group, path, was, now = found
        raise UserError(
            "the model or the optimizer is not the one of the last fit",
            why=f"`{group}: {path}` was {was} and is {now}",
            fix="write restart=True to start over",
        )
