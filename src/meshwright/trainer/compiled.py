"""The compiled step of a run: compiled once, looked at, and then run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.errors import CheckFailed, EnvironmentProblem
from meshwright.ledger import Ledger, lower_step, read_ledger
from meshwright.program.hlo import CompiledProgram, compile_program
from meshwright.program.memory import MemoryUse, memory_of
from meshwright.step.assemble import Assembled

WORTH_TELLING = 2**20
"""Bytes per update; a scalar too much is no news."""

Run = Callable[[Any, list[Any]], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to run.

    Attributes:
        run: from (state, batch leaves) to (state, metrics); the old state is consumed.
        text: gives the program the devices run, as the compiler writes it.
        ledger: what it sends; None if the compiler did not tell.
        memory: what each device holds; None if the compiler did not tell.
        seconds: how long it took to compile.
    """

    run: Run
    text: Callable[[], str | None]
    ledger: Ledger | None
    memory: MemoryUse | None
    seconds: float

    def deviations(self, *, from_bytes: int = 0) -> list[str]:
        """Say, axis by axis, where the program sends other than what its plan needs.

        Differences below ``from_bytes`` are left out.
        """
        if self.ledger is None:
            return []
        return [
            f"over {axis} it sends {own.sent_bytes:,} bytes per update where "
            f"{own.minimum_bytes:,} are needed"
            + (f" ({'; '.join(own.excess[:2])})" if own.excess else "")
            for axis, own in self.ledger.axes.items()
            if own.suspicious and abs(own.sent_bytes - own.minimum_bytes) >= from_bytes
        ]


def compile_step(assembled: Assembled, batch: Any) -> CompiledStep:
    """Compile the step for batches of this shape.

    With JAX's compilation cache on, the ledger is left out: a program from the cache comes
    without the text the ledger reads.
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
    """Refuse a program that does otherwise than its plan asked."""
    if deviations:
        raise CheckFailed(
            "the program deviates from its plan",
            why="; ".join(deviations),
            fix="`meshwright ledger` with the same settings shows where; strict=false trains",
        )


def _memory(compiled: Any) -> MemoryUse | None:
    try:
        return memory_of(compiled)
    except EnvironmentProblem:
        return None
