"""The ledger says why a program sends more than the minimum, with the bytes of a closed form."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.ledgers import Ledger

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

WIDTH, SAMPLES, DEVICES, ITERATIONS = 8, 16, 4, 6
KERNEL, VECTOR, ACTIVATION = 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * SAMPLES * WIDTH
EACH = 2 * (DEVICES - 1) / DEVICES
"""What a device sends for a byte that all of them reduce."""


@jax.custom_jvp
def product(x, kernel):
    """A product with a derivative of its own, which is evaluated as it is written."""
    return x @ kernel


@product.defjvp
def _(primals, tangents):
    (x, kernel), (dx, dkernel) = primals, tangents
    return product(x, kernel), dx @ kernel + x @ dkernel


class Looped(nnx.Module):
    """Reads its weight twice in each iteration of a loop."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.params.normal((WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x):
        def iterate(x, _):
            half = jnp.tanh(product(x, self.kernel[...]))
            return jnp.tanh(product(half, self.kernel[...])), None

        return jax.lax.scan(iterate, x, length=ITERATIONS)[0]


class Scaled(nnx.Module):
    """Multiplies by its weight element by element, in two places."""

    def __init__(self, rngs):
        self.scale = nnx.Param(rngs.params.normal((WIDTH,)))

    def __call__(self, x):
        return jnp.tanh(x * self.scale) * self.scale


class Joined(nnx.Module):
    """Reads the product of two weights: its gradient gives both of theirs."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.params.normal((WIDTH, WIDTH)) / WIDTH)
        self.scale = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return jnp.tanh(x @ (self.kernel * self.scale))


class Normalized(nnx.Module):
    """Compares samples with the mean of all."""

    def __call__(self, x):
        return jnp.tanh(x - x.mean(0))


class Reversed(nnx.Module):
    """Adds to each sample one that is on another device."""

    def __call__(self, x):
        return x + jnp.tanh(x[::-1])


class Everything(nnx.Module):
    def __init__(self, rngs):
        self.plain = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)])
        self.looped = nnx.List([Looped(rngs)])
        self.scaled = nnx.List([Scaled(rngs)])
        self.joined = nnx.List([Joined(rngs)])
        self.normalized = nnx.List([Normalized()])
        self.reversed = nnx.List([Reversed()])

    def __call__(self, x):
        parts = (self.plain, self.looped, self.scaled, self.joined, self.normalized)
        for (part,) in (*parts, self.reversed):
            x = part(x)
        return x


@pytest.fixture(scope="module")
def ledger(quick_module) -> Ledger:
    trainer = mw.Trainer(
        model=Everything,
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(0.1),
        mesh="data=4",
        devices=jax.devices()[:DEVICES],
    )
    return mw.ledger(trainer, {"x": np.ones((SAMPLES, WIDTH), np.float32)})


def explained(ledger, part):
    return {each.reason: each.sent_bytes for each in ledger.axes["data"].modules[part].explained}


def test_a_weight_that_a_loop_reads_is_reduced_in_each_iteration(ledger):
    assert explained(ledger, "looped") == {
        "gradients reduced in each of 6 iterations of a loop, for each of 2 reads": round(
            EACH * KERNEL * (2 * ITERATIONS - 1)
        )
    }


def test_a_weight_that_is_no_factor_of_a_product_is_reduced_for_each_read(ledger):
    assert explained(ledger, "scaled") == {
        "weights read by mul instead of a matrix product, gradients reduced separately": round(
            EACH * VECTOR
        )
    }


def test_one_gradient_is_reduced_for_weights_that_are_read_together(ledger):
    joined = ledger.axes["data"].modules["joined"]
    assert joined.minimum_bytes == joined.sent_bytes == round(EACH * KERNEL)


class TwoHeads(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in "ab")

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(jnp.tanh(self.down(jnp.tanh(self.up(x)))))))


def greedy_loss(model, batch):
    best = jnp.argmax(model(batch["next"]), axis=-1)
    chosen = jnp.take_along_axis(model(batch["x"]), best[:, None], axis=-1)
    return jnp.mean(chosen**2)


def test_what_is_only_compared_needs_no_gradient():
    trainer = mw.Trainer(
        model=TwoHeads,
        loss=greedy_loss,
        optimizer=optax.sgd(0.1),
        mesh="tensor=2",
        devices=jax.devices()[:2],
        sharding=mw.ShardingConfig(min_shard_size=1),
    )
    numbers = np.ones((SAMPLES, WIDTH), np.float32)
    tensor = mw.ledger(trainer, {"x": numbers, "next": numbers}).axes["tensor"]
    assert tensor.minimum_bytes <= tensor.sent_bytes


def test_sums_over_the_batch_and_samples_that_move_are_named(ledger):
    found = [*explained(ledger, "normalized").items(), *explained(ledger, "reversed").items()]
    # Forward the mean, backward its gradient.
    sums = sum(size for reason, size in found if reason.endswith("over the samples of all devices"))
    assert sums == round(2 * EACH * VECTOR)
    # Compilers differ in which equation moves the samples: the one that reverses them, one that
    # reads them, or the one whose layout is pinned.
    moved = sum(size for reason, size in found if reason.startswith("samples moved between devi"))
    assert moved == 2 * ACTIVATION // DEVICES


def test_what_a_module_needs_is_not_explained_and_the_axis_stays_flagged(ledger):
    own = ledger.axes["data"]
    assert own.modules["plain"].explained == []
    assert own.minimum_bytes == round(EACH * (3 * KERNEL + 2 * VECTOR))
    assert own.ratio == round(own.sent_bytes / own.minimum_bytes, 4)
    beyond = sum(sum(explained(ledger, part).values()) for part in own.modules)
    assert own.sent_bytes - own.minimum_bytes - beyond < 32
    assert ledger.suspicious == ["data"]
    (why,) = ledger.model_dump(mode="json")["axes"]["data"]["modules"]["looped"]["explained"]
    assert why["sent_bytes"] == round(EACH * KERNEL * 11)
    assert "more on data, looped: gradients reduced in each of 6 iterations" in str(ledger)


def test_a_ledger_can_be_read_again(ledger):
    written = ledger.model_dump(mode="json")
    assert Ledger.model_validate_json(json.dumps(written)) == ledger
    written["axes"]["data"]["explianed"] = 0
    with pytest.raises(ValueError, match="explianed"):
        Ledger.model_validate_json(json.dumps(written))
