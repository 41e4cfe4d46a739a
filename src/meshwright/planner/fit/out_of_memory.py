"""The error when a device runs out of memory: what the step needs, and what would need less."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property

from meshwright.compiled.memory import (
    MemoryUse,
    Shortage,
    describe_devices,
    explain_shortage,
    explaining_shortage,
    largest_buffers,
)
from meshwright.errors import OutOfMemory, UserError
from meshwright.hardware import Hardware, detect
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.fit.fit_check import least_memory, list_memory
from meshwright.planner.fit.remedies import find_remedies, rank_remedies, unranked
from meshwright.program.blocks.block_lists import find_block_lists
from meshwright.program.blocks.to_scan import roll_program
from meshwright.step.assemble import Assembled
from meshwright.text.units import human_bytes

MOST_REMEDIES = 6


@dataclass(frozen=True)
class KnownProgram:
    """The memory of a compiled program on each device, and what returns its optimized text."""

    memory: MemoryUse | None
    text: Callable[[], str | None]


@dataclass
class MemoryAdvice:
    """Explains why a step does not fit, with remedies that a resumable run could resume with."""

    assembled: Assembled
    make_estimator: Callable[[], Estimator] | None = None
    resumable: Callable[[], bool] = lambda: False

    def during(
        self, doing: Callable[[], str], program: KnownProgram | None = None, *, trains: bool = True
    ) -> AbstractContextManager[None]:
        """Turn JAX's exception about memory into a message with numbers and remedies."""
        return explaining_shortage(
            lambda shortage: self._explain(shortage, doing(), program, trains=trains)
        )

    def _explain(
        self, shortage: Shortage, doing: str, program: KnownProgram | None, *, trains: bool
    ) -> OutOfMemory:
        devices = self.assembled.mesh.local_devices
        lines = [*describe_devices(shortage, devices), *(self._needs(program) if trains else ())]
        fix = "\n".join(self.remedies(trains=trains))
        return explain_shortage(shortage, doing, lines=lines, fix=fix)

    def remedies(self, *, trains: bool = True) -> list[str]:
        """Return what would need less memory, a line each."""
        assembled = self.assembled
        found = find_remedies(
            assembled.plan,
            has_blocks=self._has_blocks(),
            rolls_blocks=self._rolls_blocks(),
            trains=trains,
            same_results=self.resumable(),
            shared_memory=assembled.mesh.devices.flat[0].platform == "cpu",
        )
        ranked = rank_remedies(found, assembled.plan, *self._predicts) if self._predicts else []
        found = ranked or unranked(found)
        if not found:
            return ["use devices with more memory, a smaller batch or a smaller model"]
        title = "what needs less memory, with the same global batch:"
        return [title, *(f"  {remedy}" for remedy in found[:MOST_REMEDIES])]

    def _needs(self, program: KnownProgram | None) -> Iterator[str]:
        least = least_memory(self.assembled)
        memory = None if program is None else program.memory
        if program is None or memory is None:
            total = human_bytes(least.total)
            yield f"a step needs at least {total} per device: {list_memory(least)}"
        else:
            yield (
                f"the compiled step needs {human_bytes(memory.total)} per device: "
                f"{human_bytes(least.parameters)} of parameters + {human_bytes(least.optimizer)} "
                f"of optimizer state + {human_bytes(least.batch)} of batch + "
                f"{human_bytes(memory.temp)} temporary"
            )
        if self._predicts is not None:
            hardware, estimator = self._predicts
            predicted = estimator.estimate(self.assembled.plan, hardware).memory.total
            yield f"the planner predicts {human_bytes(predicted)} per device"
        text = None if program is None else program.text()
        if text:
            yield "its largest temporary values:"
            yield from (f"  {buffer}" for buffer in largest_buffers(text))

    @cached_property
    def _predicts(self) -> tuple[Hardware, Estimator] | None:
        """The hardware and an estimator that knows this plan's memory; None if there is none.

        On CPUs, what a change saves is not predicted.
        """
        hardware = detect(list(self.assembled.mesh.devices.flat))
        if self.make_estimator is None or hardware is None or hardware.chip.platform == "cpu":
            return None
        try:
            estimator = self.make_estimator()
            _ = estimator.estimate(self.assembled.plan, hardware).memory
        except Exception:
            # Whatever a prediction fails on, the message about memory comes first.
            return None
        return hardware, estimator

    def _has_blocks(self) -> bool:
        traced, plan = self.assembled.traced, self.assembled.plan
        stacked = any(step.stacked for step in traced.layout.step_leaves)
        return plan.size("pipe") > 1 or stacked or bool(find_block_lists(traced.closed.jaxpr.eqns))

    def _rolls_blocks(self) -> bool:
        plan = self.assembled.plan
        if plan.sharding.blocks == "scan" or plan.size("pipe") > 1:
            return False
        with suppress(UserError):
            rolled = roll_program(self.assembled.traced).traced
            return any(step.stacked for step in rolled.layout.step_leaves)
        return False
