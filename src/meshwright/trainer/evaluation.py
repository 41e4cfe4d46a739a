"""Evaluation: the mean loss and metrics of held-out batches, with the model in evaluation mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.data.feed import Data
from meshwright.program.forward import Forward
from meshwright.program.layout import Layout
from meshwright.program.policy import COMPUTE_DTYPES
from meshwright.program.remat import choose_remat
from meshwright.program.rolled import roll_program
from meshwright.program.trace import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import decide
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.trainer.feed import Feed
from meshwright.weighted import Weighted


class Evaluator:
    """Evaluates a training state on held-out data.

    The model runs in evaluation mode: no dropout, and batch statistics as they are.

    Args:
        assembled: the step whose states are evaluated.
        loss: the loss it was made from.
        data: held-out samples, always the same ones.
        batches: the most batches one evaluation takes.
    """

    def __init__(self, assembled: Assembled, loss: Loss, data: Data, *, batches: int) -> None:
        plan = assembled.plan
        self._assembled = assembled
        self._loss = loss
        size = plan.batch.micro_batch_size * plan.batch.replicas
        enough = batches if data.num_samples is None else max(1, data.num_samples // size)
        self.num_batches = min(batches, enough)
        self._feed = Feed(data, batch_size=size, sharding=assembled.step.shardings.batch)
        self._size = size
        self._run: Any = None

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss and metrics over the batches."""
        sums: Any = None
        leaves = self._assembled.step.leaf_values(state)
        with self._feed.open(0, self.num_batches) as batches:
            for batch in batches:
                if self._run is None:
                    self._run = self._compile(batch)
                found = self._run(leaves, batch)
                sums = found if sums is None else jax.tree.map(lambda a, b: a + b, sums, found)
        return {name: _mean(value) for name, value in jax.device_get(sums).items()}

    def _compile(self, batch: Sequence[Any]) -> Any:
        assembled, plan = self._assembled, self._assembled.plan
        structs = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in batch]
        whole = jax.tree.unflatten(assembled.batch_tree, structs)
        traced = trace_loss(
            _in_evaluation_mode(self._loss), assembled.parts, whole, COMPUTE_DTYPES[plan.precision]
        )
        if plan.sharding.blocks == "scan":
            traced = roll_program(traced).traced
        forward = self._forward(traced)
        translate = _Translation(assembled.traced.layout, traced.layout)

        def run(leaves: list[Any], batch: list[Any]) -> dict[str, Weighted]:
            value = forward(translate(leaves), batch)
            return {"loss": value.objective, **value.metrics}

        return jax.jit(run, out_shardings=NamedSharding(assembled.mesh, PartitionSpec()))

    def _forward(self, traced: TracedLoss) -> Forward:
        plan, mesh = self._assembled.plan, self._assembled.mesh
        decision = decide(traced, plan.mesh, plan.sharding)
        return Forward(
            traced,
            mesh=mesh,
            pins=decision.pins,
            weights=decision.weights,
            gathers=decision.gathers,
            whole=[placement.without("fsdp") for placement in decision.at_rest],
            remat=choose_remat("none", keep_gathered=True),
        )


class _Translation:
    """Turns the leaves of one layout of a model into those of another."""

    def __init__(self, before: Layout, after: Layout) -> None:
        self._before, self._after = before, after
        self._same = {step.sources: n for n, step in enumerate(before.step_leaves)}

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        canonical = self._before.to_canonical(leaves)
        return [
            leaves[self._same[step.sources]]
            if step.sources in self._same
            else step.join([canonical[source] for source in step.sources])
            for step in self._after.step_leaves
        ]


def _in_evaluation_mode(loss: Loss) -> Loss:
    def evaluate(model: Any, batch: Any) -> Any:
        for part in model.values() if isinstance(model, dict) else (model,):
            part.eval()
        return loss(model, batch)

    return evaluate


def _mean(value: Weighted) -> float:
    return float(value.total / value.weight) if value.weight else float(np.nan)
