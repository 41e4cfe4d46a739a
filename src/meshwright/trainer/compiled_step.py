"""The compiled step of a run, with its communication ledger and memory use."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.activity import activity
from meshwright.compiled.hlo import CompiledProgram, compile_program
from meshwright.compiled.memory import MemoryUse, memory_of
from meshwright.errors import CheckFailed, EnvironmentProblem
from meshwright.ledgers import Ledger, lower_step, read_ledger
from meshwright.step.assemble import Assembled

WARN_FROM_BYTES = 2**20
"""Smaller deviations per update, such as one more scalar, are not worth a warning."""

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
    """Compile the step for batches of this shape.

    With JAX's compilation cache enabled there is no ledger: a cached program comes without the
    text that the ledger is read from.
    """
    lowered = lower_step(assembled, batch)
    started = time.perf_counter()
    program: CompiledProgram | None = None
    if not jax.config.values["jax_compilation_cache_dir"]:
        with suppress(EnvironmentProblem):
            program = compile_program(lowered)
    compiled: Any = lowered.compile() if program is None else program.compiled
    seconds = time.perf_counter() - started
    assembled.step.check(compiled)
    return CompiledStep(
        run=compiled,
        text=compiled.as_text,
        ledger=None
        if program is None
        else read_ledger(assembled, program, compile_seconds=seconds),
        memory=_memory(compiled),
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


def _memory(compiled: Any) -> MemoryUse | None:
    try:
        return memory_of(compiled)
    except EnvironmentProblem:
        return None
