"""A model divided as chosen computes what one device computes, on a quarter of the memory."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quick import quick_module
from sharding.tensor_models import (
    Convolutional,
    Experts,
    Language,
    Modern,
    Perceptron,
    Recurrent,
    Residual,
    Stacked,
    general,
    grouped,
    library,
    numbers,
    square_loss,
    tokens,
    trace,
    word_loss,
)

from meshwright.sharding.tensor import choose_tensor_dims

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

DEVICES = 4


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}
"""Half the time to compile; how the program is partitioned does not change."""

RUNS = {
    "gpt": (lambda r: Language(r, tied=False), word_loss, tokens, (0.25, 0.26)),
    "library": (library, word_loss, tokens, (0.25, 0.26)),
    "grouped": (grouped, word_loss, tokens, (0.25, 0.32)),
    "modern": (Modern, word_loss, tokens, (0.25, 0.26)),
    "general": (general, word_loss, tokens, (0.25, 0.26)),
    "perceptron": (Perceptron, square_loss, lambda: numbers(784), (0.25, 0.26)),
    "convolutional": (Convolutional, square_loss, lambda: numbers(8, 8, 3), (0.25, 0.26)),
    "recurrent": (Recurrent, word_loss, tokens, (0.25, 0.85)),
    "residual": (Residual, square_loss, lambda: numbers(30), (0.25, 0.26)),
    "experts": (Experts, word_loss, tokens, (0.25, 0.26)),
    "stacked": (lambda r: Stacked(r, blocks=2), word_loss, tokens, (0.25, 0.26)),
}


def divide(traced, batch):
    """Return the choice, the step compiled for it, and the leaves where it wants them."""
    choice = choose_tensor_dims(traced.classes, DEVICES)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("tensor",))
    shardings = [
        NamedSharding(mesh, spec(choice.dim_of(leaf.path), len(leaf.shape)))
        for leaf in traced.classes.leaves[:-1]
    ]
    everywhere = NamedSharding(mesh, PartitionSpec())
    outs = (everywhere, shardings[: traced.trained])
    step = jax.jit(traced.step, out_shardings=outs, **QUICK)
    args = jax.device_put(traced.leaves, shardings), jax.device_put(batch, everywhere)
    return choice, step.lower(*args).compile(), args


def spec(dim, rank):
    return PartitionSpec(*("tensor" if d == dim else None for d in range(rank)))


EVERYDAY = ("library", "residual")
"""Kinds that no proof covers; the others are also in tests/parity."""


@pytest.mark.parametrize(
    "name",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in RUNS],
)
def test_a_step_on_four_devices_equals_one_device(name):
    make, loss, batch, (least, most) = RUNS[name]
    traced = trace(make, loss, batch())
    _, step, args = divide(traced, batch())
    value, params = jax.jit(traced.step, **QUICK)(traced.leaves, batch())
    divided_value, divided = step(*args)
    np.testing.assert_allclose(divided_value, value, rtol=1e-10)
    for leaf, one, four in zip(traced.classes.weights, params, divided, strict=True):
        error = np.abs(np.asarray(four) - np.asarray(one)).max()
        assert error <= 1e-10 * np.abs(one).max(), leaf.path

    held = sum(param.addressable_shards[0].data.nbytes for param in divided)
    assert least <= held / sum(param.nbytes for param in params) <= most


@pytest.mark.parametrize(
    "name", [pytest.param("perceptron", marks=pytest.mark.full), "convolutional"]
)
def test_the_traffic_foreseen_is_the_traffic_compiled(name):
    """Models without attention, where the compiler merges all partial sums it could merge."""
    make, loss, batch, _ = RUNS[name]
    traced = trace(make, loss, batch())
    choice, step, _ = divide(traced, batch())
    collectives = re.findall(
        r"= (.*) (all-\S+|reduce-scatter|collective-permute)\(", step.as_text()
    )
    assert {kind for _, kind in collectives} == {"all-reduce"}
    shapes = [shape for results, _ in collectives for shape in re.findall(r"f64\[(.*?)\]", results)]
    reduced = sum(8 * math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)
    # An all-reduce sends its array twice.
    assert 2 * reduced == traced.classes.traffic(choice.splits)
