"""The tolerance of rounding covers what float32 does, and little more."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import quick

import meshwright as mw
from meshwright.proof.rounding import gradient_rounding, rounding_tolerance


def deep(x, scale):
    """Norms and activations without a single product of matrices."""

    def layer(x, _):
        return jnp.tanh(x * scale) / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3), None

    x, _ = jax.lax.scan(layer, x, None, length=40)
    return (x**2).mean()


def test_arithmetic_between_products_counts():
    random = np.random.default_rng(0)
    x, scale = random.normal(size=(8, 16)), 1 + 0.1 * random.normal(size=16)
    narrow = [np.asarray(a, np.float32) for a in (x, scale)]
    tolerance = rounding_tolerance(jax.make_jaxpr(deep)(*narrow))
    with jax.enable_x64(True):
        exact = quick(jax.grad(deep, 1))(*[a.astype(np.float64) for a in narrow])
        exact = np.asarray(exact)
    found = quick(jax.grad(deep, 1))(*narrow)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 0 < error <= tolerance
    assert tolerance < 1e-5


def test_moving_numbers_does_not_round_them():
    def moved(x):
        return jnp.concatenate([x.T[::-1], x.T], axis=1).reshape(-1)[3:]

    x = np.ones((4, 4), np.float32)
    one_sum = rounding_tolerance(jax.make_jaxpr(lambda x: x)(x))
    assert rounding_tolerance(jax.make_jaxpr(moved)(x)) == one_sum


def test_gradients_are_rounded_to_the_format_of_their_parameters():
    assert gradient_rounding([jnp.float32, jnp.float64]) == 0
    assert gradient_rounding([jnp.float32, jnp.bfloat16]) == 2.0**-8
    assert gradient_rounding([jnp.float16]) == 2.0**-11


class Half(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(16, 4, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@pytest.mark.full
def test_a_model_with_parameters_of_16_bits_is_certified():
    random = np.random.default_rng(0)
    sizes = {"x": (32, 8), "y": (32, 4)}
    batch = {name: random.normal(size=size).astype("float32") for name, size in sizes.items()}
    trainer = mw.Trainer(
        model=Half,
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        mesh="data=4",
        gradient_accumulation_steps=4,
        devices=jax.devices()[:4],
    )
    assert trainer.verify(lambda step: batch, steps=1).equal
