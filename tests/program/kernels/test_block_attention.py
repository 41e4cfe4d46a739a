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
from meshwright.program.kernels import fused_attention
from meshwright.program.kernels.block_attention import Tile, block_attention
from meshwright.program.kernels.fused_attention import check_kernel, make_attend, run_attention
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


@pytest.mark.parametrize("name", SCORES)
def test_blocks_give_the_operations_as_written(name):
    random = np.random.default_rng(0)
    qkv = random.normal(size=(3, SAMPLES, LENGTH, HEADS, CHANNELS)).astype(np.float32)
    segments = np.sort(random.integers(4, size=(SAMPLES, LENGTH), dtype=np.int32), axis=1)
    given = *qkv, {"hidden": random.integers(2, size=(SAMPLES, LENGTH)) > 0, "segments": segments}
    assert not given[-1]["hidden"][:, 0].all(), "no position attends to hidden keys alone"
    own, run = matched(name, given)
    attend = block_attention(own.function, own.allowed, TILES, interpret=True)
    found = quick(lambda *given: differentiated(lambda *a: run(attend, *a), *given))(*given)
    expected = quick(lambda *given: differentiated(SCORES[name][0], *given))(*given)
    assert_close(found, expected, 1e-5)


class Layer(nnx.Module):
    """A projection, attention, and another projection."""

    def __init__(self, name, rngs):
        self.form = SCORES[name][0]
        self.qkv = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, HEADS, CHANNELS)) / 4)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (HEADS, CHANNELS, WIDTH)) / 4)

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
    ("length", "channels", "dtype", "reason"),
    [
        (1024, 64, jnp.float32, "bf16, not float32"),
        (512, 64, jnp.bfloat16, "rows of 1,024 positions or more, a multiple of 128, not 512"),
        (1100, 64, jnp.bfloat16, "rows of 1,024 positions or more, a multiple of 128, not 1,100"),
        (1024, 80, jnp.bfloat16, "heads of 64 or 128 channels, not 80"),
    ],
)
def test_what_was_not_measured_stays_as_written(length, channels, dtype, reason):
    own, _ = matched("alibi", structs(2, length, channels, dtype))
    with pytest.raises(NotReplaced) as refusal:
        check_kernel(own, "gpu")
    why = "its scores are changed by sub, for which a kernel needs "
    assert str(refusal.value) == why + reason


def test_a_kernel_is_used_if_there_is_triton(monkeypatch):
    own, _ = matched("alibi", structs(2, 1024, 64, jnp.bfloat16))
    assert check_kernel(own, "gpu") == check_kernel(own, "gpu", planned=True) == "pallas"
    monkeypatch.delitem(sys.modules, block_attention.__module__)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with pytest.raises(NotReplaced, match="has no Triton"):
        check_kernel(own, "gpu")
