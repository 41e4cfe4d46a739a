"""Norms and activations are found, evaluated to the same numbers, and save less."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import (
    Forms,
    assembled,
    assert_equal,
    both,
    differentiate,
    uses_in,
)

from meshwright.step.step_program import planned_forward

WIDTH = 16


class Normed(nnx.Module):
    """A norm between two layers."""

    def __init__(self, make, rngs):
        self.up, self.down = (_matrix(rngs) for _ in range(2))
        self.norm = make(rngs)

    def __call__(self, x):
        return self.norm(x @ self.up[...]) @ self.down[...]


class Scaled(nnx.Module):
    """A norm written by hand, by a function of activations and a scale."""

    def __init__(self, function, rngs):
        self.function = function
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return self.function(x, self.scale[...])


class Activated(nnx.Module):
    """An activation function between two layers; it may have a second operand."""

    def __init__(self, function, rngs):
        self.function = function
        self.up, self.gate, self.down = (_matrix(rngs) for _ in range(3))
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        up = x @ self.up[...] + self.bias[...]
        return self.function(up, x @ self.gate[...]) @ self.down[...]


def _matrix(rngs):
    return nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))


def by_deviation(x, scale):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5) * scale


def by_variance(x, scale):
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5) * scale


def gemma(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def on_scale(function):
    return lambda rngs: Scaled(function, rngs)


NORMS = {
    "layer_norm": lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
    "without_bias": lambda rngs: nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs),
    "without_scale": lambda rngs: nnx.LayerNorm(WIDTH, use_scale=False, rngs=rngs),
    "slow_variance": lambda rngs: nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs),
    "rms_norm": lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs),
    "by_variance": on_scale(by_variance),
    "by_deviation": on_scale(by_deviation),
    "gemma": on_scale(gemma),
}

ACTIVATIONS = {
    "gelu": lambda up, gate: jax.nn.gelu(up),
    "exact_gelu": lambda up, gate: jax.nn.gelu(up, approximate=False),
    "silu": lambda up, gate: jax.nn.silu(up),
    "swiglu": lambda up, gate: jax.nn.silu(up) * gate,
    "geglu": lambda up, gate: jax.nn.gelu(up) * gate,
    "sigmoid_gate": lambda up, gate: jax.nn.sigmoid(up) * gate,
    "tanh": lambda up, gate: jnp.tanh(up),
}

WITH_OWN_DERIVATIVE = {"softplus": lambda up, gate: jax.nn.softplus(up)}
"""JAX gives these a derivative of their own, which is kept."""

FORMS = {name: functools.partial(Normed, make) for name, make in NORMS.items()}
FORMS |= {name: functools.partial(Activated, f) for name, f in ACTIVATIONS.items()}
ALL = FORMS | {n: functools.partial(Activated, f) for n, f in WITH_OWN_DERIVATIVE.items()}


def build(names):
    return lambda: Forms({name: ALL[name] for name in names}, rngs=nnx.Rngs(0))


def loss(model, batch):
    return sum(jnp.mean(jnp.square(getattr(model, name)(batch["x"]))) for name in model.names)


def batch(samples=4, length=6):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(samples, length, WIDTH)).astype(np.float32)}


EVERYDAY = (
    *("layer_norm", "without_scale", "slow_variance", "rms_norm", "by_deviation"),
    *("exact_gelu", "swiglu", "tanh"),
)


@pytest.fixture(scope="module")
def runs():
    return both(build((*EVERYDAY, *WITH_OWN_DERIVATIVE)), loss, batch())


def check_form(runs, name):
    found, _ = runs
    (use,) = uses_in(name, found.uses, "norm" if name in NORMS else "activation")
    assert (use.kernel, use.reason) == ("recomputed", "")
    assert_equal(*runs, under=f"{name}.")


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_form_is_found_and_equals_the_plain_program(runs, name):
    check_form(runs, name)


@pytest.mark.full
def test_every_form_is_found_and_equals_the_plain_program():
    runs = both(build(ALL), loss, batch())
    for name in FORMS:
        check_form(runs, name)


@pytest.mark.parametrize("name", WITH_OWN_DERIVATIVE)
def test_a_function_with_its_own_derivative_stays_as_written(runs, name):
    found, _ = runs
    assert not uses_in(name, found.uses, "activation")
    assert_equal(*runs, under=f"{name}.")


class Capped(nnx.Module):
    """Functions of scores, of a running sum, and of a layer times what no layer returns."""

    def __init__(self, rngs):
        self.up, self.gate = (_matrix(rngs) for _ in range(2))

    def __call__(self, x):
        scores = jnp.tanh(jnp.einsum("btd,bsd->bts", x, x @ self.up[...]))
        decay = jnp.exp(-jnp.cumsum(jnp.square(x), axis=1))
        return jnp.einsum("bts,bsd->btd", scores, decay) * nnx.silu(x @ self.gate[...])


class Convolved(nnx.Module):
    """An activation function between two convolutions."""

    def __init__(self, rngs):
        self.up, self.down = (nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


def test_what_a_convolution_reads_from_memory_is_not_recomputed():
    def squares(model, batch):
        return jnp.mean(jnp.square(model(batch["x"])))

    found = differentiate(lambda: Convolved(nnx.Rngs(0)), squares, batch(), "xla")
    assert [use.reason for use in found.uses] == ["a convolution reads its result from memory"]


def test_what_the_compiler_fuses_with_products_is_not_recomputed():
    def squares(model, batch):
        return jnp.mean(jnp.square(model(batch["x"])))

    found = differentiate(lambda: Capped(nnx.Rngs(0)), squares, batch(), "xla")
    assert not [use for use in found.uses if use.kernel]
    assert [use.reason for use in found.uses] == [
        "it multiplies something other than what a layer returns"
    ]


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "exact_gelu", "swiglu"])
def test_fewer_numbers_are_saved(name):
    """Counted in the residuals of the loss: what its backward pass reads."""
    saved = {kernels: _saved(build([name]), kernels) for kernels in ("xla", "none")}
    assert saved["xla"] < saved["none"], saved


def _saved(build, kernels):
    total, values = _loss_of_values(build, kernels)
    saved = jax.eval_shape(lambda v: jax.vjp(total, v)[1], values)
    return sum(leaf.size for leaf in jax.tree.leaves(saved))


def _loss_of_values(build, kernels, **options):
    made = assembled(build, loss, batch(8, 64), kernels, wide=False, **options)
    forward = planned_forward(made.traced, made.decision, made.plan, made.mesh)
    values = made.traced.layout.from_canonical(made.model_leaves.values(build()))
    return lambda v: forward(v, jax.tree.leaves(batch(8, 64))).objective.total, values


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_gradients_of_scale_and_bias_are_summed_in_parts(precision):
    """64 sums of 8 rows each, so that all processors of a GPU take part."""
    total, values = _loss_of_values(build(["layer_norm"]), "xla", precision=precision)
    program = str(jax.make_jaxpr(jax.grad(total))(values))
    assert len(re.findall(rf"f32\[8,8,{WIDTH}\] = reduce_sum", program)) == 2


def test_a_bias_of_heads_is_added_as_one_vector():
    """The compiler adds vectors while it multiplies, and would write this bias out for all rows."""

    def heads(rngs):
        made = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
        made.bias[...] = jax.random.normal(jax.random.key(1), (4, 8))
        return made

    def squares(model, batch):
        return jnp.mean(jnp.square(model.heads(batch["x"])))

    build = lambda: Forms({"heads": heads}, rngs=nnx.Rngs(0))  # noqa: E731
    runs = both(build, squares, batch(8, 64), wide=False, precision="bf16")
    assert_equal(*runs, tolerance=1e-2)
    made = assembled(build, squares, batch(8, 64), "xla", wide=False, precision="bf16")
    forward = planned_forward(made.traced, made.decision, made.plan, made.mesh)
    values = made.traced.layout.from_canonical(made.model_leaves.values(build()))
    program = str(jax.make_jaxpr(lambda v: forward(v, jax.tree.leaves(batch(8, 64))))(values))
    assert "bf16[8,64,32] = add" in program
    assert "bf16[8,64,4,8] = add" not in program


@pytest.mark.full
def test_gradients_of_half_precision_scales_are_as_accurate_as_without():
    names = ["layer_norm", "gemma", "exact_gelu"]
    truth = differentiate(build(names), loss, batch(8, 32), "none").gradients
    errors = {}
    for kernels in ("xla", "none"):
        run = differentiate(build(names), loss, batch(8, 32), kernels, wide=False, precision="bf16")
        errors[kernels] = {
            path: np.abs(run.gradients[path] - value).max() / np.abs(value).max()
            for path, value in truth.items()
            if path.endswith(("scale", "bias"))
        }
    for path, error in errors["xla"].items():
        assert error <= 1.5 * errors["none"][path] + 1e-3, (path, errors)
