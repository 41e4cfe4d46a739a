"""The compiled programs of an assembled step, each compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwright.program.trace.traced_loss import Loss
from meshwright.step.assemble import Assembled
from meshwright.step.eval_step import Evaluate, Predict, compile_evaluation, compile_prediction
from meshwright.trainer.compiled_step import CompiledStep


class Programs:
    """Compiles the programs of a step when they are first needed.

    Args:
        assembled: the step.
        loss: what evaluations compute.
    """

    def __init__(self, assembled: Assembled, loss: Loss) -> None:
        self.assembled, self.loss = assembled, loss
        self._compiled: dict[Any, Any] = {}

    @property
    def batch_like(self) -> Any:
        """The shapes of a microbatch, nested as batches are."""
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.assembled.traced.batch]
        return jax.tree.unflatten(self.assembled.batch_tree, leaves)

    def step(self, batch: Any, compile_it: Callable[[], CompiledStep]) -> CompiledStep:
        """Return the step, compiled for batches of this shape."""
        return self._once(("step", *_shapes(batch)), compile_it)

    def evaluation(
        self, batch: Sequence[Any], num_microbatches: int, warn: Callable[[str], None]
    ) -> Evaluate:
        """Return the evaluation of batches like this one; see `compile_evaluation`."""
        return self._once(
            ("evaluation", num_microbatches, *_shapes(batch)),
            lambda: compile_evaluation(self.assembled, self.loss, batch, num_microbatches, warn),
        )

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


def _shapes(batch: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(batch)
    return tree, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
