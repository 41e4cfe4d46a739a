"""The compiled programs of a run: the step, with its ledger and memory, and evaluations."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jax

from meshwright.compiled.compile_program import CompiledProgram, compile_program
from meshwright.compiled.memory import MemoryUse
from meshwright.errors import CheckFailed, EnvironmentProblem
from meshwright.ledgers import Ledger, lower_step, read_ledger
from meshwright.processes import process_count
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.runtime.activity import activity
from meshwright.runtime.garbage import few_collections
from meshwright.step.assemble import Assembled
from meshwright.step.canonical import CanonicalForm
from meshwright.step.eval_step import (
    Evaluate,
    Predict,
    compile_evaluation,
    compile_prediction,
    lower_evaluation,
)

WARN_FROM_BYTES = 2**20
"""Smaller deviations per step, such as one more scalar, are not worth a warning."""

CACHED_SECONDS = 2.0
"""A program that is not there by then does not come from the cache."""

T = TypeVar("T")

StepFunction = Callable[[Any, list[Any]], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step, from (state, batch leaves) to (state, metrics); the old state is donated.

    What the compiler does not report is None.
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
            f"over {axis} each device sends {own.sent_bytes:,} bytes per step where "
            f"{own.minimum_bytes:,} are needed"
            + (f" ({'; '.join(own.excess[:2])})" if own.excess else "")
            for axis, own in self.ledger.axes.items()
            if own.suspicious and abs(own.sent_bytes - own.minimum_bytes) >= from_bytes
        ]


@activity("compiling the step")
@few_collections()
def compile_step(
    assembled: Assembled,
    batch: Any,
    *,
    meanwhile: Callable[[], None] | None = None,
    if_long: Callable[[], None] | None = None,
    key: str | None = None,
) -> CompiledStep:
    """Compile the step for batches of this shape; a ``key`` stands for it, see `TrainStep.lower`.

    ``meanwhile`` is called while it compiles, or is read from the cache, in another thread, and
    then ``if_long`` if it compiles. Several processes call neither.
    """
    compile_it = partial(compile_program, lower_step(assembled, batch, key), key=key)
    started = time.perf_counter()
    program = _compile_beside(compile_it, meanwhile, if_long)
    seconds = time.perf_counter() - started
    assembled.step.check(program)
    return CompiledStep(
        run=program.compiled,
        text=program.optimized_or_none,
        ledger=_reported(lambda: read_ledger(assembled, program, compile_seconds=seconds)),
        memory=_reported(lambda: program.memory),
        seconds=seconds,
    )


def _compile_beside(
    compile_it: Callable[[], CompiledProgram],
    meanwhile: Callable[[], None] | None,
    if_long: Callable[[], None] | None,
) -> CompiledProgram:
    # Several processes compile in the same order, and agree from one thread.
    if meanwhile is None or process_count() > 1:
        return compile_it()
    thread = ThreadPoolExecutor(1, "step")
    compiling = thread.submit(copy_context().run, compile_it)
    thread.shutdown(wait=False)
    meanwhile()
    if if_long is not None and wait([compiling], CACHED_SECONDS).not_done:
        if_long()
    return compiling.result()


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


class Programs:
    """Compiles the programs of a step, and of the loss in evaluation, when first needed."""

    def __init__(self, assembled: Assembled, loss: Loss) -> None:
        self.assembled, self.loss = assembled, loss
        self._compiled: dict[Any, Any] = {}
        self._ahead: dict[Any, Future[Evaluate]] = {}

    @cached_property
    def form(self) -> CanonicalForm:
        """The canonical form of the step's states, whose programs compile once."""
        return CanonicalForm(self.assembled)

    @property
    def batch_like(self) -> Any:
        """The shapes of a microbatch, nested as batches are."""
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.assembled.traced.batch]
        return jax.tree.unflatten(self.assembled.batch_tree, leaves)

    def evaluated_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that evaluations compute, besides the loss."""
        return trace_loss(self.loss, self.assembled.model_leaves, self.batch_like).metric_names

    def step(self, batch: Any, compile_it: Callable[[], CompiledStep]) -> CompiledStep:
        """Return the step, compiled for batches of this shape."""
        return self._once(("step", *_shapes(batch)), compile_it)

    def evaluation(
        self, batch: Sequence[Any], num_microbatches: int, warn: Callable[[str], None]
    ) -> Evaluate:
        """Return the evaluation of batches like this one; see `compile_evaluation`."""
        key = _evaluation_key(batch, num_microbatches)

        def compile_it() -> Evaluate:
            if key in self._ahead:
                # What failed in the other thread is tried again, and reported, in this one.
                with suppress(Exception), activity("compiling the evaluation"):
                    return self._ahead.pop(key).result()
            return compile_evaluation(self.assembled, self.loss, batch, num_microbatches, warn)

        return self._once(key, compile_it)

    def compile_evaluation_ahead(self, batch: Sequence[Any], num_microbatches: int) -> None:
        """Trace the evaluation of batches like this one now, and compile it in another thread.

        Evaluations wait for it. Pipeline stages and several processes compile when they evaluate:
        whether stages can be used shows only then, and processes compile in the same order.
        """
        key = _evaluation_key(batch, num_microbatches)
        apart = self.assembled.plan.size("pipe") > 1 or process_count() > 1
        if apart or key in self._compiled or key in self._ahead:
            return
        with suppress(Exception):
            lowered = lower_evaluation(self.assembled, self.loss, batch)
            thread = ThreadPoolExecutor(1, "evaluation")
            self._ahead[key] = thread.submit(lowered.compile)
            thread.shutdown(wait=False)

    def prediction(self, function: Callable[[Any, Any], Any], batch: Any) -> Predict:
        """Return the prediction for batches like this one; see `compile_prediction`."""
        return self._once(
            ("prediction", function, *_shapes(batch)),
            lambda: compile_prediction(self.assembled, function, batch),
        )

    def _once(self, key: Any, compile_it: Callable[[], Any]) -> Any:
        if key not in self._compiled:
            self._compiled[key] = compile_it()
        return self._compiled[key]


def _evaluation_key(batch: Sequence[Any], num_microbatches: int) -> tuple[Any, ...]:
    return "evaluation", num_microbatches, *_shapes(batch)


def _shapes(batch: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(batch)
    return tree, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
