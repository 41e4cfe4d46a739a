"""Evaluation: the mean loss and metrics of held-out batches, with the model in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.data.batches import form_of, read_batch
from meshwright.data.protocols import Data
from meshwright.data.user_data import IterableData, SequenceData
from meshwright.errors import UserError
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
        batches: the most batches one evaluation takes, each as large as one of training.
        warn: told what evaluation cannot do as training does.
    """

    def __init__(
        self,
        assembled: Assembled,
        loss: Loss,
        data: Data,
        *,
        batches: int,
        warn: Callable[[str], None],
    ) -> None:
        plan = assembled.plan
        self._assembled, self._loss, self._warn = assembled, loss, warn
        self._replicas = plan.batch.replicas
        # Stages work on several microbatches at a time.
        self._most = plan.num_microbatches if plan.size("pipe") > 1 else 1
        if isinstance(data, SequenceData | IterableData):
            size, self._num_batches = self._own_size(data), batches
        else:
            micro = plan.batch.micro_batch_size * plan.batch.replicas
            count = self._in_all(data.num_samples, batches) // micro or 1
            together = max(n for n in range(1, self._most + 1) if count % n == 0)
            size, self._num_batches = micro * together, count // together
        self._feed = Feed(data, batch_size=size, sharding=assembled.step.shardings.batch)
        self._runs: dict[Any, Evaluate] = {}

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss and metrics over the batches."""
        sums: Any = None
        leaves = self._assembled.step.leaf_values(state)
        with self._feed.open(0, self._num_batches) as batches:
            for batch in batches:
                found = self._compiled(batch)(leaves, batch)
                sums = found if sums is None else jax.tree.map(lambda a, b: a + b, sums, found)
        if sums is None:
            raise _nothing()
        return {name: _mean(value) for name, value in jax.device_get(sums).items()}

    def _in_all(self, present: int | None, batches: int) -> int:
        """Return the samples of one evaluation, the same on every mesh; too few are all taken."""
        size = self._assembled.plan.batch.global_batch_size
        if present is None:
            return batches * size
        return min(batches * size, present // size * size or present)

    def _compiled(self, batch: Sequence[Any]) -> Evaluate:
        shapes = tuple(leaf.shape for leaf in batch)
        if shapes not in self._runs:
            count = self._microbatches(shapes[0][0])
            self._runs[shapes] = evaluation(self._assembled, self._loss, batch, count, self._warn)
        return self._runs[shapes]

    def _own_size(self, data: SequenceData | IterableData) -> int:
        """Return the samples of batches that were given as such, or refuse them."""
        first = data.first()
        if first is None:
            raise _nothing()
        size = form_of(read_batch(first)).num_samples
        self._microbatches(size)
        return size

    def _microbatches(self, samples: int) -> int:
        """Return into how many microbatches a batch is divided."""
        if samples % self._replicas:
            below = samples // self._replicas * self._replicas
            sizes = " or ".join(str(n) for n in (below, below + self._replicas) if n)
            raise UserError(
                f"batches of {samples} samples for evaluation cannot be divided over the mesh",
                why=f"{self._replicas} groups of devices take the same number of samples each",
                fix=f"give batches of {sizes} samples, or a dict of arrays",
            )
        each = samples // self._replicas
        return max(n for n in range(1, self._most + 1) if each % n == 0)


def _nothing() -> UserError:
    return UserError(
        "there is nothing to evaluate",
        why="eval_data gave no batch; a generator can be gone through only once",
        fix="give a list of batches, or a dict of arrays",
    )


def _mean(value: Weighted) -> float:
    return float(value.total / value.weight) if value.weight else float(np.nan)
