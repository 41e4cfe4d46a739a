"""Pipeline stages: wrong microbatches, orders, slots and schedules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from mutations.mutation import Mutation
from mutations.proofs_of import CHUNKS, SPLIT_BACKWARD, STAGES
from mutations.sabotage import replace

from meshwright.pipeline.divide.division import Division
from meshwright.pipeline.execute import pipelined_loss
from meshwright.pipeline.execute.stage_work import StageWork


def _rows(change):
    """Change the table of ticks."""

    def make(right):
        def table(*arguments, **options):
            counts, rows = right(*arguments, **options)
            return counts, change(rows)

        return table

    return replace(pipelined_loss, "table_rows", make)


def _without(name, stage):
    """Drop the last operation of a kind on one stage."""

    def change(rows):
        op = getattr(rows, name)
        numbers = np.array(op.microbatch)
        numbers[np.flatnonzero(numbers[:, stage] >= 0)[-1], stage] = -1
        return dataclasses.replace(rows, **{name: dataclasses.replace(op, microbatch=numbers)})

    return change


def _skip_tick(rows):
    middle = len(rows.stage) // 2
    return jax.tree.map(lambda column: np.delete(column, middle, axis=0), rows)


def _one_slot(rows):
    """Let all forward passes save their values in one slot, whoever still needs it."""
    ops = {
        name: dataclasses.replace(getattr(rows, name), saved=np.minimum(op.saved, 0))
        for name, op in (("forward", rows.forward), ("backward", rows.backward))
    }
    return dataclasses.replace(rows, **ops)


def _other_cut(rows):
    """Let weight gradients read what the neighbouring slot holds."""
    cut = rows.weight.cut
    other = np.where(cut >= 0, (cut + 1) % (cut.max() + 1), cut)
    return dataclasses.replace(rows, weight=dataclasses.replace(rows.weight, cut=other))


def _swapped_targets(right):
    def head_gradient(self, message, number):
        return right(self, message, jnp.where(number < 2, 1 - number, number))

    return head_gradient


def _unweighted(right):
    def head_gradient(self, message, number):
        found = right(self, message, number)
        weight = found.losses.objective.weight
        scaled = jax.tree.map(lambda g: g / weight * 40, (found.outer, found.back))
        return dataclasses.replace(found, outer=scaled[0], back=scaled[1])

    return head_gradient


def _reversed(right):
    def rows(self):
        return tuple(reversed(right(self)))

    return rows


def _first_chunk(right):
    def held(self, chunk):
        return right(self, jnp.zeros_like(chunk))

    return held


def _mutation(does, break_it, caught, *, check=STAGES, names="", seen=""):
    return Mutation(does, break_it, check, caught, names=names, seen=seen)


MUTATIONS = (
    _mutation(
        "the last stage takes the targets of another microbatch",
        replace(StageWork, "head_gradient", _swapped_targets),
        ("float64 loss", "float64 gradients", "own_precision gradients"),
        names="step 1",
    ),
    _mutation(
        "stages hold each other's blocks",
        replace(Division, "rows", _reversed),
        ("float64 loss", "float64 gradients"),
        names="step 1",
    ),
    _mutation(
        "chunks are computed with the weights of the first",
        replace(StageWork, "held", _first_chunk),
        ("float64 loss", "float64 gradients"),
        check=CHUNKS,
        names="step 1",
    ),
    _mutation(
        "the last backward pass of a stage is dropped",
        _rows(_without("backward", 0)),
        ("float64 gradients", "own_precision gradients"),
    ),
    _mutation(
        "the last weight gradient of a stage is dropped",
        _rows(_without("weight", 1)),
        ("float64 gradients", "own_precision gradients"),
        check=SPLIT_BACKWARD,
    ),
    _mutation(
        "a weight gradient reads another microbatch's values",
        _rows(_other_cut),
        ("float64 gradients", "own_precision gradients"),
        check=SPLIT_BACKWARD,
    ),
    _mutation(
        "the schedule skips a tick",
        _rows(_skip_tick),
        ("float64 gradients", "own_precision gradients"),
    ),
    _mutation(
        "what a forward pass saves is overwritten before its backward pass",
        _rows(_one_slot),
        ("float64 gradients", "own_precision gradients"),
    ),
    _mutation(
        "microbatches of a pipeline count the same although their weights differ",
        replace(StageWork, "head_gradient", _unweighted),
        ("float64 gradients", "own_precision gradients"),
        seen="token means averaged over microbatches",
    ),
)
