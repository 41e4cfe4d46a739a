"""Evaluation: the mean loss and metrics of held-out batches, with the model in evaluation mode."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshwright.data.feed import Data
from meshwright.program.trace import Loss
from meshwright.step.assemble import Assembled
from meshwright.step.evaluate import Evaluate, evaluation
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
        # Stages work on several microbatches at a time: as many as divide the batches evenly.
        most = plan.num_microbatches if plan.size("pipe") > 1 else 1
        self._together = max(n for n in range(1, most + 1) if self.num_batches % n == 0)
        self._feed = Feed(
            data, batch_size=size * self._together, sharding=assembled.step.shardings.batch
        )
        self._run: Evaluate | None = None

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss and metrics over the batches."""
        sums: Any = None
        leaves = self._assembled.step.leaf_values(state)
        with self._feed.open(0, self.num_batches // self._together) as batches:
            for batch in batches:
                if self._run is None:
                    self._run = evaluation(self._assembled, self._loss, batch, self._together)
                found = self._run(leaves, batch)
                sums = found if sums is None else jax.tree.map(lambda a, b: a + b, sums, found)
        return {name: _mean(value) for name, value in jax.device_get(sums).items()}


def _mean(value: Weighted) -> float:
    return float(value.total / value.weight) if value.weight else float(np.nan)
