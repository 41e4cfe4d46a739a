"""Remat and the lifetime of gathered weights change memory and traffic, never a gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import QUICK, assert_close, quick
from small_models import (
    WIDTH,
    Residuals,
    Turns,
    double,
    plain_gradients,
    square_loss,
    vectors,
)
from step.runs import filled, put_together

import meshwright as mw
from meshwright.compiled.collectives import read_collectives
from meshwright.compiled.compile_program import compile_program
from meshwright.compiled.memory import memory_of
from meshwright.program.evaluate.widen import widen

EVERY = [
    {"remat": remat, "keep_gathered": keep, "blocks": blocks}
    for remat in ("none", "full", "dots")
    for keep in (False, True)
    for blocks in ("unroll", "scan")
]
SOME = [EVERY[0], EVERY[5], EVERY[8], EVERY[11]]


@pytest.fixture(scope="module")
def plain():
    """Return loss and gradients by Flax alone, in float64."""
    with jax.enable_x64(True):
        graphdef, state = nnx.split(double(filled(Residuals)))
        batch = {name: np.float64(array) for name, array in vectors().items()}
        run = quick(lambda s, b: plain_gradients(nnx.merge(graphdef, s), square_loss, b))
        return run(state, batch)


def check_gradients(options, plain):
    with jax.enable_x64(True):
        assembled = put_together(
            Residuals, square_loss, vectors(), {"fsdp": 4, "tensor": 2}, **options
        )
        values = assembled.model_leaves.values(filled(Residuals))
        state = assembled.start([jax.device_get(widen(v)) for v in values])
        found = quick(lambda s, b: vars(assembled.step.gradients(s, b)))(
            state, assembled.put_batch(vectors())
        )
        gradients = assembled.canonical_params(found["values"])
    assert float(found["loss"]) == pytest.approx(float(plain[0]), rel=1e-12)
    assert_close(gradients, plain[1], 1e-12)


@pytest.mark.parametrize("options", SOME)
def test_gradients_are_those_of_one_device(options, plain):
    check_gradients(options, plain)


@pytest.mark.full
@pytest.mark.parametrize("options", [o for o in EVERY if o not in SOME])
def test_gradients_are_those_of_one_device_with_every_option(options, plain):
    check_gradients(options, plain)


def kernel_gathers(options):
    """Return how many kernels a compiled step gathers over fsdp=8, and in which modules."""
    assembled = put_together(
        lambda: Residuals(3), square_loss, vectors(), {"fsdp": 8}, wide=False, **options
    )
    program = compile_program(assembled.step.lower(assembled.put_batch(vectors())))
    kernel = 4 * WIDTH * 2 * WIDTH
    found = [
        collective
        for collective in read_collectives(program.partitioned, {"fsdp": 8})
        if collective.kind == "all-gather" and collective.payload_bytes >= kernel
    ]
    return sum(c.count * c.payload_bytes for c in found) / kernel, {c.module for c in found}


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        # Twice in three blocks of two kernels; only the very first product has no gradient to
        # hand on, so its kernel is not needed again.
        pytest.param({"remat": "none"}, 11, marks=FULL),
        ({"remat": "full", "keep_gathered": True}, 6),
        ({"remat": "none", "blocks": "scan"}, 12),
        pytest.param({"remat": "full", "blocks": "scan"}, 12, marks=FULL),
        pytest.param({"keep_gathered": True, "blocks": "scan"}, 6, marks=FULL),
    ],
)
def test_weights_are_gathered_twice_a_block_or_once_if_kept(options, kernels):
    count, modules = kernel_gathers(options)
    assert count == kernels
    blocks = ["*"] if options.get("blocks") == "scan" else [0, 1, 2]
    if not options.get("keep_gathered"):
        assert modules == {f"blocks.{b}.{layer}" for b in blocks for layer in ("up", "down")}


def temporary(num_blocks, width=32, **options):
    """Return the temporary bytes of a compiled step."""
    assembled = put_together(
        lambda: Residuals(num_blocks, width),
        square_loss,
        vectors(width=width),
        {"fsdp": 8},
        wide=False,
        blocks="scan",
        **options,
    )
    lowered = assembled.step.lower(assembled.put_batch(vectors(width=width)))
    return memory_of(lowered.compile(QUICK)).temp


def test_temporary_memory_of_rolled_blocks_does_not_grow_with_depth():
    width = 32
    block = 4 * (2 * 2 * width * width + 2 * width)
    activation = 4 * (16 // 8) * width
    shallow, deep = temporary(4, remat="full"), temporary(16, remat="full")
    # What a block leaves behind: its input, and its gradient's piece of an eighth.
    assert (deep - shallow) / 12 <= activation + 1.1 * block / 8
    assert temporary(16, remat="full", keep_gathered=True) >= deep + 15 * block


class Wide(nnx.Module):
    """A layer applied to rows of rows, wide enough for the CPU to leave it to its library."""

    def __init__(self):
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x.reshape(16, 8, 64)).reshape(x.shape)


def test_half_precision_gradients_run_on_one_device_and_are_summed_in_float32():
    batch = vectors(width=512)
    assembled = put_together(Wide, square_loss, batch, {}, wide=False, precision="bf16")
    state, placed = assembled.adopt(filled(Wide)), assembled.put_batch(batch)
    lowered = jax.jit(lambda s, b: assembled.step.gradients(s, b).values).lower(state, placed)
    found = assembled.canonical_params(lowered.compile()(state, placed))["linear.kernel"]
    x = np.float64(jnp.bfloat16(batch["x"])).reshape(-1, 64)
    model = filled(Wide).linear
    kernel, bias = (np.float64(jnp.bfloat16(v[...])) for v in (model.kernel, model.bias))
    y = np.float64(jnp.bfloat16(np.float32(jnp.bfloat16(x @ kernel)) + np.float32(bias)))
    error = np.float64(jnp.bfloat16(2 * (y - batch["y"].reshape(-1, 64)) / batch["x"].size))
    # 128 rows are summed: in bf16 the sum would be off by 2⁻⁸ of its size.
    np.testing.assert_allclose(found, x.T @ error, atol=2**-11 * np.abs(x.T @ error).max())


class Sums(nnx.Module):
    """Weights that are repeated for samples, in every way: each gradient is a sum over them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.places = nnx.Embed(WIDTH, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8))
        self.shift = nnx.Param(jnp.zeros((WIDTH, 8)))
        self.turn = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = x[..., None] * self.scale[...] + self.places(jnp.arange(WIDTH)) + self.shift[None]
        y, _ = jax.lax.scan(lambda y, _: (self.turn(y), None), y, length=2)
        return y.mean(axis=-1)


def test_half_precision_gradients_are_summed_over_devices_in_float32():
    batch = vectors()
    assembled = put_together(Sums, square_loss, batch, {"data": 4}, wide=False, precision="bf16")
    text = compile_program(assembled.step.lower(list(batch.values())), QUICK).partitioned
    shapes = re.findall(r"= (\S+) all-reduce\(", text)
    assert len(shapes) >= len(assembled.model_leaves.leaves)
    assert {shape.partition("[")[0] for shape in shapes} == {"f32"}
    state, placed = assembled.adopt(filled(Sums)), assembled.put_batch(batch)
    gradients = quick(lambda s, b: assembled.step.gradients(s, b).values)(state, placed)
    _, plain = plain_gradients(filled(Sums), square_loss, batch)
    # Values are rounded to bf16 a few times on the way; sums of 256 of them are not.
    assert_close(assembled.canonical_params(gradients), plain, 2**-6)


# Blocks in a loop, recomputed one by one, are proven every day: test_layer_scans.py.
@pytest.mark.full
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_blocks_beside_a_loop_are_recomputed_like_those_in_it(precision):
    """Of five blocks of two kinds in turn, two pairs are rolled and one block is left over."""
    trainer = mw.Trainer(
        model=lambda rngs: Turns(5, rngs=rngs),
        loss=square_loss,
        optimizer=optax.sgd(0.1),
        mesh="data=2",
        devices=jax.devices()[:2],
        precision=precision,
        sharding=mw.ShardingConfig(blocks="scan", remat="dots"),
    )
    certificate = trainer.verify(lambda step: vectors(4, seed=step), steps=1)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
