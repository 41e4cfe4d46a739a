"""The compiled step of a run, with its communication ledger and memory use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.compiled.compile_program import compile_program
from meshwright.compiled.memory import MemoryUse
from meshwright.errors import CheckFailed, EnvironmentProblem
from meshwright.ledgers import Ledger, lower_step, read_ledger
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled

WARN_FROM_BYTES = 2**20
"""Smaller deviations per update, such as one more scalar, are not worth a warning."""

T = TypeVar("T")

StepFunction = Callable[[Any, list[Any]], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
        run: from (state, batch leaves) to (state, metrics); the old state is donated.
        text: returns the optimized program as text; None if the compiler has none.
        ledger: what the step communicates; None if the compiler does not report it.
        memory: memory use per device; None if the compiler does not report it.
        seconds: compilation time.
    """

    run: StepFunction
    text: Callable[[], str | None]
    ledger: Ledger | None
    memory: MemoryUse | None
    seconds: float

    def deviations(self, *, from_bytes: int = 0) -> list[str]:
        """Describe, axis by axis, where the step sends more or less than its plan needs.

        Differences below ``from_bytes`` are left out.
        """
        if self.ledger is None:
            return []
        return [
            f"over {axis} the step sends {own.sent_bytes:,} bytes per update where "
            f"{own.minimum_bytes:,} are needed"
            + (f" ({'; '.join(own.excess[:2])})" if own.excess else "")
            for axis, own in self.ledger.axes.items()
            if own.suspicious and abs(own.sent_bytes - own.minimum_bytes) >= from_bytes
        ]


@activity("compiling the step")
def compile_step(assembled: Assembled, batch: Any) -> CompiledStep:
    """Compile the step for batches of this shape."""
    lowered = lower_step(assembled, batch)
    started = time.perf_counter()
    program = compile_program(lowered)
    seconds = time.perf_counter() - started
    assembled.step.check(program)
    return CompiledStep(
        run=program.compiled,
        text=program.optimized_or_none,
        ledger=_reported(lambda: read_ledger(assembled, program, compile_seconds=seconds)),
        memory=_reported(lambda: program.memory),
        seconds=seconds,
    )


def refuse_deviations(deviations: list[str]) -> None:
    """Raise if the program deviates from its plan."""
    if deviations:
        raise CheckFailed(
            "the program deviates from its plan",
            why="; ".join(deviations),
            fix="see `meshwright ledger` with the same settings, or train with strict=false",
        )


def _reported(read: Callable[[], T]) -> T | None:
    """Return what is read from a program; None if the compiler does not report it."""
    try:
        return read()
    except EnvironmentProblem:
        return None
