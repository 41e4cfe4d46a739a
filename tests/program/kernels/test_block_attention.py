"""Attention with any function of its scores, a block at a time, and when it is used."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.attention_forms import CHANNELS, HEADS, LENGTH, SAMPLES, SCORES
from program.kernels.kernel_runs import assert_equal, differentiate
from program.programs import assert_close, quick

import meshwright as mw
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.kernels import attention_by_rows, fused_attention
from meshwright.program.kernels.attention_by_rows import rows_attention
from meshwright.program.kernels.block_attention import Tile, block_attention
from meshwright.program.kernels.fused_attention import (
    check_kernel,
    make_attend,
    run_attention,
)
from meshwright.program.kernels.match_attention import makes_weights, match_attention
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.surroundings import Scope
from meshwright.program.trace.normalize import normalize

WIDTH = 8
TILES = Tile(8, 4, 4, 2), Tile(8, 4, 4, 2), Tile(4, 8, 4, 2)


def structs(samples, length, channels, dtype):
    qkv = [jax.ShapeDtypeStruct((samples, length, HEADS, channels), dtype)] * 3
    rows = {name: jax.ShapeDtypeStruct((samples, length), kind) for name, kind in KINDS.items()}
    return *qkv, rows


KINDS = {"hidden": bool, "segments": jnp.int32}


def matched(name, operands):
    """Return an attention, and a function that evaluates its program by another form of it."""
    closed = normalize(jax.make_jaxpr(SCORES[name][0])(*operands))
    jaxpr, consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    scope = Scope(ProgramDims(jaxpr, "", 1), consts)
    (match,) = [m for end in makes_weights(scope.graph) if (m := match_attention(scope, end))]
    made = {v for eqn in match.eqns for v in eqn.outvars}

    def run(attend, *given):
        values = {**consts, **dict(zip(jaxpr.invars, jax.tree.leaves(given), strict=True))}
        for eqn in jaxpr.eqns:
            if match.output in eqn.outvars:
                read = [values[v] for v in match.operands.inputs]
                values[match.output] = run_attention(match.operands, attend, *read)
            elif not made.intersection(eqn.outvars):
                Evaluator().extend(values, [eqn])
        return values[jaxpr.outvars[0]]

    return match.operands, run


def differentiated(run, *operands):
    """Return the result and the gradients of query, key and value."""
    *qkv, batch = operands
    out, pull = jax.vjp(lambda *qkv: run(*qkv, batch), *qkv)
    return dict(zip(("out", "q", "k", "v"), (out, *pull(jnp.cos(out))), strict=True))


EVERYDAY = ("packed_soft_cap", "padded_sums", "sigmoid")
"""With masks of a batch by choices and by sums, and without a softmax."""


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in SCORES]
)
def test_blocks_and_rows_give_the_operations_as_written(name, monkeypatch):
    random = np.random.default_rng(0)
    qkv = random.normal(size=(3, SAMPLES, LENGTH, HEADS, CHANNELS)).astype(np.float32)
    segments = np.sort(random.integers(4, size=(SAMPLES, LENGTH), dtype=np.int32), axis=1)
    given = *qkv, {"hidden": random.integers(2, size=(SAMPLES, LENGTH)) > 0, "segments": segments}
    assert not given[-1]["hidden"][:, 0].all(), "no position attends to hidden keys alone"
    own, run = matched(name, given)
    expected = quick(lambda *given: differentiated(SCORES[name][0], *given))(*given)
    monkeypatch.setattr(attention_by_rows, "ROWS", 5)
    by_blocks = block_attention(own.function, own.allowed, TILES, interpret=True)
    for attend in (by_blocks, rows_attention(own.function, own.allowed)):
        found = quick(lambda *given, to=attend: differentiated(lambda *a: run(to, *a), *given))
        assert_close(found(*given), expected, 1e-5)


class Layer(nnx.Module):
    """A projection, attention, and another projection."""

    def __init__(self, name, rngs):
        self.name = name
        self.qkv = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, HEADS, CHANNELS)) / 4)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (HEADS, CHANNELS, WIDTH)) / 4)

    def form(self, q, k, v, batch):
        return SCORES[self.name][0](q, k, v, batch)

    def __call__(self, x, batch):
        q, k, v = jnp.einsum("btd,ndhc->nbthc", x, self.qkv[...])
        mixed = self.form(q, k, v, batch)
        return x + jnp.tanh(jnp.einsum("bthc,hcd->btd", mixed, self.out[...]))


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, name):
        self.layers = nnx.List([Layer(name, nnx.Rngs(n)) for n in range(2)])

    def __call__(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch)
        return x


@pytest.mark.full
@pytest.mark.parametrize("name", ["alibi", "packed_soft_cap", "sigmoid"])
@pytest.mark.parametrize(
    ("mesh", "sharding"),
    [
        ("data=2,tensor=2", {}),
        ("data=2", {"remat": "dots"}),
        ("data=1", {"remat": "full"}),
        ("data=1", {"blocks": "scan"}),
    ],
)
def test_blocks_on_meshes_in_rematerialized_and_in_scanned_layers(
    name, mesh, sharding, monkeypatch
):
    made = []

    def attend(own, form):
        made.append(own)
        return block_attention(own.function, own.allowed, TILES, interpret=True)

    monkeypatch.setattr(fused_attention, "make_attend", attend)
    random = np.random.default_rng(0)
    batch = {
        "x": random.normal(size=(SAMPLES, LENGTH, WIDTH)).astype(np.float32),
        "segments": np.sort(random.integers(4, size=(SAMPLES, LENGTH), dtype=np.int32), axis=1),
    }
    build = lambda: Model(name)  # noqa: E731
    loss = lambda model, batch: jnp.mean(jnp.sin(model(batch)))  # noqa: E731
    config = mw.ShardingConfig(min_shard_size=0, **sharding)
    options = {"mesh": mesh, "sharding": config}
    found = differentiate(build, loss, batch, "xla", wide=False, **options)
    assert made
    assert_equal(found, differentiate(build, loss, batch, "none", wide=False), 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("name", SCORES)
def test_blocks_are_compiled_for_gpus(name, channels):
    """As far as that is possible without one."""
    given = structs(2, 1024, channels, jnp.bfloat16)
    own, run = matched(name, given)
    attend = make_attend(own, check_kernel(own, "gpu"))
    program = jax.jit(lambda *given: differentiated(lambda *a: run(attend, *a), *given))
    text = program.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize(
    ("name", "length", "channels", "dtype", "reason"),
    [
        ("alibi", 1024, 64, jnp.float32, ""),
        ("alibi", 1100, 64, jnp.bfloat16, ""),
        ("alibi", 1024, 256, jnp.bfloat16, ""),
        ("alibi", 512, 64, jnp.bfloat16, "rows of 1,024 positions or more, not 512"),
        ("padded", 1024, 256, jnp.bfloat16, "bf16, 64 or 128 channels, a multiple of 128 "
            "positions, and no learned values"),
    ],
)  # fmt: skip
def test_without_a_kernel_rows_pay_where_most_keys_are_hidden(
    name, length, channels, dtype, reason
):
    own, _ = matched(name, structs(2, length, channels, dtype))
    if not reason:
        assert check_kernel(own, "gpu") == "xla"
        return
    with pytest.raises(NotReplaced) as refusal:
        check_kernel(own, "gpu")
    assert str(refusal.value).endswith(f", for which a kernel needs {reason}")


class ByDistance(Layer):
    """With a learned bias for each head and distance."""

    def __init__(self, rngs):
        super().__init__("alibi", rngs)
        self.biases = nnx.Param(jax.random.normal(rngs.params(), (HEADS, LENGTH)))

    def form(self, q, k, v, batch):
        places = jnp.arange(LENGTH)
        back = places[:, None] - places
        biases = self.biases[...][:, jnp.maximum(back, 0)]
        scores = jnp.einsum("bthc,bshc->bhts", q, k) + biases
        weights = jax.nn.softmax(jnp.where(back >= 0, scores, -1e9))
        return jnp.einsum("bhts,bshc->bthc", weights, v)


@pytest.mark.parametrize(
    "mesh", [pytest.param("data=1", marks=pytest.mark.full), "data=2,tensor=2"]
)
def test_biases_may_be_learned(mesh, monkeypatch):
    monkeypatch.setattr(attention_by_rows, "ROWS", 5)
    x = np.random.default_rng(0).normal(size=(SAMPLES, LENGTH, WIDTH)).astype(np.float32)
    build = lambda: ByDistance(nnx.Rngs(0))  # noqa: E731
    loss = lambda model, batch: jnp.mean(jnp.sin(model(batch["x"], batch)))  # noqa: E731
    config = mw.ShardingConfig(min_shard_size=0)
    found = differentiate(build, loss, {"x": x}, "xla", mesh=mesh, sharding=config)
    said = [f"{use.detail}: {use.kernel}" for use in found.uses if use.kind == "attention"]
    assert said == ["causal, its scores are changed by add: xla"]
    assert_equal(found, differentiate(build, loss, {"x": x}, "none"))


def test_a_kernel_is_used_if_there_is_triton(monkeypatch):
    own, _ = matched("alibi", structs(2, 1024, 64, jnp.bfloat16))
    assert check_kernel(own, "gpu") == check_kernel(own, "gpu", planned=True) == "pallas"
    monkeypatch.delitem(sys.modules, block_attention.__module__)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with pytest.raises(NotReplaced, match="has no Triton"):
        check_kernel(own, "gpu")
