"""Repeated and other random bits: on every device, in every microbatch, layer or step."""

import dataclasses

import jax
import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import (
    DATA,
    DATA_ACCUMULATED,
    FSDP_TOKENS,
    LOCAL_TOKENS,
    SCAN,
    STAGES,
    TENSOR,
)
from mutations.sabotage import equation, replace

from meshwright.pipeline.execute.stage_work import StageWork
from meshwright.program.on_mesh.mesh_forward import LocalDraws
from meshwright.program.trace.layout import StepLeaf
from meshwright.step import train_step
from meshwright.trees import is_key


def _repeated(dim):
    """Give the second half of a dim the bits of the first."""

    def change(run, key):
        (bits,) = run(key)
        half = jnp.split(bits, 2, axis=dim)[0]
        return [jnp.concatenate([half, half], axis=dim)]

    return change


def _is_counter(leaf):
    return leaf.dtype == jnp.uint32 and not leaf.ndim


def _other_bits(right):
    def compute(function, params, state, batch, scale):
        other = [s + 1 if _is_counter(s) else s for s in state]
        return right(function, params, other, batch, scale)

    return compute


def _same_in_every_microbatch(right):
    def accumulate(function, params, state, microbatches, *rest):
        def again(params, now, batch):
            stuck = [s if _is_counter(s) else n for s, n in zip(state, now, strict=True)]
            return function(params, stuck, batch)

        return right(again, params, state, microbatches, *rest)

    return accumulate


def _same_in_every_update(right):
    def update(self, state, batch):
        after, metrics = right(self, state, batch)
        kept = [
            old if _is_counter(old) else new
            for old, new in zip(state.model_state, after.model_state, strict=True)
        ]
        return dataclasses.replace(after, model_state=kept), metrics

    return update


def _same_in_every_layer(right):
    def join(self, values):
        same = self.stacked and is_key(values[0])
        return right(self, [values[0]] * len(values) if same else values)

    return join


def _recomputed_with_other_bits(run, mask, off, on):
    """Forward with one mask, backward with another."""
    (kept,) = run(mask, off, on)
    (again,) = run(jnp.roll(mask, 1, axis=0), off, on)
    return [jax.lax.stop_gradient(kept - again) + again]


def _rows_not_advanced(right):
    def put(self, stacks, rows, chunk):
        del self, rows, chunk
        return stacks

    return put


MUTATIONS = (
    Mutation(
        "dropout draws other bits on the mesh",
        replace(train_step, "compute_gradients", _other_bits),
        DATA,
        ("float64 loss", "float64 gradients", "float64 state"),
        names="step 1",
    ),
    Mutation(
        "dropout draws the same bits on every data device",
        replace(LocalDraws, "draw", lambda right: lambda self, eqn, env: None),
        LOCAL_TOKENS,
        ("float64 loss", "float64 gradients", "own_precision gradients"),
        seen="devices seeded alike",
        names="step 1",
    ),
    Mutation(
        "dropout draws the same bits on every tensor device",
        equation("random_bits", "blocks.0.dropout", _repeated(2)),
        TENSOR,
        ("float64 loss", "float64 gradients", "own_precision gradients"),
        seen="one random state for all tensor-parallel ranks",
        names="step 1",
    ),
    Mutation(
        "dropout draws the same bits in every microbatch",
        replace(train_step, "accumulate_gradients", _same_in_every_microbatch),
        DATA_ACCUMULATED,
        ("float64 loss", "float64 state"),
        names="step 1",
    ),
    Mutation(
        "dropout draws the same bits in every step",
        replace(train_step.TrainStep, "_update", _same_in_every_update),
        DATA,
        ("float64 loss", "float64 state", "own_precision state"),
        names="step 2",
    ),
    Mutation(
        "dropout draws the same bits in every layer of a scan",
        replace(StepLeaf, "join", _same_in_every_layer),
        SCAN,
        ("float64 loss", "float64 gradients"),
        names="step 1",
    ),
    Mutation(
        "a stage draws the same bits for every microbatch",
        replace(StageWork, "put_rows", _rows_not_advanced),
        STAGES,
        ("float64 loss", "float64 state"),
        names="step 1",
    ),
    Mutation(
        "a rematerialized block draws other bits than in its forward pass",
        equation("select_n", "blocks.0.dropout", _recomputed_with_other_bits),
        FSDP_TOKENS,
        ("float64 gradients", "own_precision gradients"),
        seen="activation checkpointing that does not restore the random state",
    ),
)
