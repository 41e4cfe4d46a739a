"""Evaluation: mean loss and metrics on held-out data, with the model in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.data.batches import form_of, read_batch
from meshwright.data.protocols import Data
from meshwright.data.user_data import IterableData, SequenceData
from meshwright.errors import UserError
from meshwright.program.trace.traced_loss import Loss
from meshwright.step.assemble import Assembled
from meshwright.step.eval_step import Evaluate, compile_evaluation
from meshwright.step.state import TrainState
from meshwright.trainer.batch_loader import BatchLoader
from meshwright.weighted import Weighted


class Evaluator:
    """Evaluates training states on held-out data.

    The model runs in eval mode: without dropout, and with its running batch statistics.

    Args:
        assembled: the step whose states are evaluated.
        loss: the loss the step was made from.
        data: held-out samples, the same in every evaluation.
        batches: the most batches one evaluation uses, each as large as a training batch.
    """

    def __init__(self, assembled: Assembled, loss: Loss, data: Data, *, batches: int) -> None:
        plan = assembled.plan
        self._assembled, self._loss = assembled, loss
        self._replicas = plan.batch.replicas
        # Pipeline stages work on several microbatches at a time.
        self._max_microbatches = plan.num_microbatches if plan.size("pipe") > 1 else 1
        if isinstance(data, SequenceData | IterableData):
            size, self._num_batches = self._given_size(data), batches
        else:
            micro = plan.batch.micro_batch_size * plan.batch.replicas
            count = self._total_samples(data.num_samples, batches) // micro or 1
            together = max(n for n in range(1, self._max_microbatches + 1) if count % n == 0)
            size, self._num_batches = micro * together, count // together
        self._loader = BatchLoader(data, batch_size=size, sharding=assembled.step.shardings.batch)
        self._compiled: dict[Any, Evaluate] = {}

    def __call__(self, state: TrainState, warn: Callable[[str], None]) -> dict[str, float]:
        """Return the mean loss and metrics.

        Args:
            state: the training state.
            warn: called if evaluation cannot run in pipeline stages as training does.
        """
        sums: Any = None
        leaves = self._assembled.step.leaf_values(state)
        with self._loader.open(0, self._num_batches) as batches:
            for batch in batches:
                values = self._compile(batch, warn)(leaves, batch)
                sums = values if sums is None else jax.tree.map(lambda a, b: a + b, sums, values)
        if sums is None:
            raise _no_batches()
        return {name: _mean(value) for name, value in jax.device_get(sums).items()}

    def _total_samples(self, available: int | None, batches: int) -> int:
        """Return the samples of one evaluation, the same on every mesh.

        They fill whole training batches, unless there is less than one.
        """
        size = self._assembled.plan.batch.global_batch_size
        if available is None:
            return batches * size
        return min(batches * size, available // size * size or available)

    def _compile(self, batch: Sequence[Any], warn: Callable[[str], None]) -> Evaluate:
        shapes = tuple(leaf.shape for leaf in batch)
        if shapes not in self._compiled:
            self._compiled[shapes] = compile_evaluation(
                self._assembled, self._loss, batch, self._num_microbatches(shapes[0][0]), warn
            )
        return self._compiled[shapes]

    def _given_size(self, data: SequenceData | IterableData) -> int:
        """Return the samples per batch of data given as batches; raise if the mesh cannot."""
        first = data.first()
        if first is None:
            raise _no_batches()
        size = form_of(read_batch(first)).num_samples
        self._num_microbatches(size)
        return size

    def _num_microbatches(self, samples: int) -> int:
        """Return the number of microbatches of a batch."""
        if samples % self._replicas:
            below = samples // self._replicas * self._replicas
            sizes = " or ".join(str(n) for n in (below, below + self._replicas) if n)
            raise UserError(
                f"batches of {samples} samples for evaluation cannot be divided over the mesh",
                why=f"each of {self._replicas} groups of devices gets the same number of samples",
                fix=f"give batches of {sizes} samples, or a dict of arrays",
            )
        each = samples // self._replicas
        return max(n for n in range(1, self._max_microbatches + 1) if each % n == 0)


def _no_batches() -> UserError:
    return UserError(
        "there is no data to evaluate on",
        why="eval_data has no batches; a generator can only be read once",
        fix="give a list of batches, or a dict of arrays",
    )


def _mean(value: Weighted) -> float:
    return float(value.total / value.weight) if value.weight else float(np.nan)
