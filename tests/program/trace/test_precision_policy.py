"""Under bf16 and fp16 every matrix product runs in the compute dtype, and the loss in float32."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import dots, trace
from small_models import (
    SIZES,
    WIDTH,
    Norms,
    builder,
    numbers,
    square_loss,
    task_batch,
    vectors,
)

from meshwright.program.trace.precision_policy import cast_floats

pytestmark = pytest.mark.quick


def dot_formats(traced):
    return {str(v.aval.dtype) for eqn in dots(traced.closed) for v in eqn.invars}


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_every_product_of_every_model_kind_runs_in_bf16(kind):
    seen = []

    def loss(model, batch):
        def watched(*args, **kwargs):
            out = model(*args, **kwargs)
            seen.extend(a.dtype for a in jax.tree.leaves(out))
            return out

        return own_loss(watched, batch)

    own_loss, batch = task_batch(kind)
    _, traced = trace(builder(kind), loss, batch, jnp.bfloat16)
    assert dot_formats(traced) == {"bfloat16"}
    assert set(seen) == {jnp.dtype(jnp.float32)}


def test_fp16_reaches_products_inside_a_scan():
    loss, batch = task_batch("stacked_gpt")
    _, traced = trace(builder("stacked_gpt"), loss, batch, jnp.float16)
    assert len(dots(traced.closed)) >= 8
    assert dot_formats(traced) == {"float16"}


def test_grouped_and_fused_attention_and_a_separate_head_run_in_bf16():
    loss, batch = task_batch("gpt")
    for sizes in ({"num_kv_heads": 2}, {"qkv": "fused", "tied_embeddings": False}):
        _, traced = trace(builder("gpt", **sizes), loss, batch, jnp.bfloat16)
        assert dot_formats(traced) == {"bfloat16"}


def test_statistics_stay_float32_and_parameters_enter_in_float32():
    model_leaves, traced = trace(Norms, square_loss, vectors(), jnp.bfloat16)
    avals = traced.closed.in_avals[: len(model_leaves.leaves)]
    formats = {leaf.path: v.dtype for leaf, v in zip(model_leaves.leaves, avals, strict=True)}
    assert all(formats[leaf.path] == leaf.dtype for leaf in model_leaves.leaves)
    outputs = traced.read_outputs(traced.closed.out_avals)
    state = [leaf for leaf in model_leaves.leaves if leaf.role == "state"]
    assert [a.dtype for a in outputs.state] == [leaf.dtype for leaf in state]
    assert {leaf.dtype for leaf in state if leaf.variable == "BatchStat"} == {jnp.dtype("float32")}


def test_frozen_weights_are_computed_with_in_bf16_but_kept_exactly():
    class Half(nnx.Module):
        def __init__(self):
            self.frozen = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.trained = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.trained(jnp.tanh(self.frozen(x)))

    only = nnx.All(nnx.Param, nnx.PathContains("trained"))
    model_leaves, traced = trace(Half, square_loss, vectors(), jnp.bfloat16, trainable=only)
    assert dot_formats(traced) == {"bfloat16"}
    kept = traced.closed.jaxpr.outvars[2:]
    assert kept == [traced.closed.jaxpr.invars[i] for i in model_leaves.indices("state")]


def test_a_random_stream_handed_to_a_module_keeps_counting():
    class Noisy(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5)
            self.rngs = nnx.Rngs(dropout=1)

        def __call__(self, x):
            return self.dropout(self.dropout(self.linear(x), rngs=self.rngs), rngs=self.rngs)

    model_leaves, traced = trace(Noisy, square_loss, vectors(), jnp.bfloat16)
    counts = [i for i, leaf in enumerate(model_leaves.leaves) if leaf.variable == "RngCount"]
    (count,) = counts
    position = model_leaves.indices("state").index(count)
    after = traced.closed.jaxpr.outvars[2 + position]
    assert after is not traced.closed.jaxpr.invars[count]


def test_only_arrays_of_the_source_format_are_cast():
    values = {"f": jnp.ones(2), "i": jnp.ones(2, int), "h": jnp.ones(2, jnp.float16), "n": None}
    cast = cast_floats(values, jnp.float32, jnp.bfloat16)
    assert [str(cast[k].dtype) for k in ("f", "i", "h")] == ["bfloat16", "int32", "float16"]
    assert cast["n"] is None
    assert cast_floats(values, jnp.float32, None) is values
    assert numbers(2).dtype == "float32"
