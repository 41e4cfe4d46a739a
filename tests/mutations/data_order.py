"""Data: samples that come twice or never, an order of its own per mesh, evaluations that pad."""

import dataclasses

import numpy as np
from mutations.mutation import Mutation
from mutations.runs_of import EVALUATED, HANDSHAKES, ORDER, OTHER_MESH
from mutations.sabotage import replace

from meshwright.data import indexed_data, order
from meshwright.step import eval_step
from meshwright.trainer import batch_loader
from meshwright.trainer.evaluating.every_sample import EverySample


def _one_twice(right):
    """Read the sample before the last in place of the last."""

    def permute(places, num_samples, *rest):
        return np.minimum(right(places, num_samples, *rest), num_samples - 2)

    return permute


def _same_order(right):
    return lambda places, num_samples, seed, epoch: right(places, num_samples, seed, 0)


def _rows_from_zero(right):
    """Every process reads the rows of the first."""

    def ids(*, rows=None, **rest):
        return right(rows=None if rows is None else rows - rows[0], **rest)

    return ids


def _seed_of_the_mesh(right):
    def init(self, data, *, sharding, **rest):
        other = dataclasses.replace(data, seed=data.seed + sharding.num_devices)
        right(self, other, sharding=sharding, **rest)

    return init


def _padded(right):
    """Fill the last batch up with the samples it starts with."""

    def remainder(self, step, count):
        rows = np.resize(np.arange(count, dtype=np.int64), self._size)
        batch = self.data.batch(step, self._size, rows)
        yield self._place(batch, self._size, None)

    return remainder


def _sabotaged(name):
    return lambda patch: patch.setenv("SABOTAGE", name)


MUTATIONS = (
    Mutation(
        "a sample comes twice in an epoch and another never",
        replace(order, "_permute", _one_twice),
        ORDER,
        ("each sample once",),
        names="epoch 0",
        everyday=True,
    ),
    Mutation(
        "every epoch has the same order",
        replace(order, "_permute", _same_order),
        ORDER,
        ("epochs differ",),
        seen="samplers that are not told the epoch",
    ),
    Mutation(
        "every process reads the rows of the first",
        replace(indexed_data, "sample_ids", _rows_from_zero),
        ORDER,
        ("rows of processes",),
        seen="loaders without a distributed sampler",
    ),
    Mutation(
        "the order depends on the number of devices",
        replace(batch_loader.BatchLoader, "__init__", _seed_of_the_mesh),
        OTHER_MESH,
        ("losses",),
        names="1",
    ),
    Mutation(
        "an evaluation counts the samples it pads with",
        replace(EverySample, "_remainder", _padded),
        EVALUATED,
        ("eval_samples", "loss"),
        seen="distributed samplers that repeat samples",
        names="32",
    ),
    Mutation(
        "an evaluation leaves out the last incomplete batch",
        replace(EverySample, "_remainder", lambda right: lambda self, step, count: iter(())),
        EVALUATED,
        ("eval_samples", "loss"),
        names="16",
    ),
    Mutation(
        "an evaluation runs with dropout and batch statistics",
        replace(eval_step, "set_eval_mode", lambda right: lambda model: None),
        EVALUATED,
        ("loss",),
    ),
    Mutation(
        "one process trains with another learning rate",
        _sabotaged("rate"),
        HANDSHAKES,
        ("settings",),
    ),
    Mutation("one process has another seed", _sabotaged("seed"), HANDSHAKES, ("settings",)),
    Mutation("one process has other data", _sabotaged("data"), HANDSHAKES, ("settings",)),
)
