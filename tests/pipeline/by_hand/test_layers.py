"""Layers that share values are refused: each stage has its own."""

import functools

import jax.numpy as jnp
import pytest
from flax import linen, nnx
from small_models import fill

from meshwright.errors import UserError
from meshwright.pipeline.by_hand.layers import read_layers

pytestmark = pytest.mark.quick


class Transposed(nnx.Module):
    """Multiplies by another layer's weights."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight[...].T


class Noise(nnx.Module):
    """Draws from a stream it may share."""

    def __init__(self, rngs):
        self.rngs = rngs


def linear():
    return fill(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))


GLOBAL = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
DENSE = linen.Dense(8)
PAIR = (lambda params, x: x * params, jnp.ones(8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda one: [one, nnx.relu, one], "layers 0 and 2 share the Param `bias`"),
        (lambda one: [one, Transposed(one.kernel)], "share the Param `kernel` (`weight`)"),
        (lambda one: [nnx.Sequential(one), one], "share the Param `layers.0.bias` (`bias`)"),
        (lambda one: [one, one.__call__], "is a function around a module (Linear)"),
        (lambda one: [functools.partial(lambda f, x: f(x), one)], "around a module (Linear)"),
        (lambda one: [lambda x: one(x)], "around a module (Linear)"),
        (lambda one: [lambda x: GLOBAL(x)], "around a module (Dropout)"),
        (lambda one: [DENSE, DENSE], "layers 0 and 1 are the same Dense"),
        (lambda one: [PAIR, PAIR], "layers 0 and 1 are the same (<lambda>, params)"),
    ],
)
def test_shared_values_are_refused(make, said):
    with pytest.raises(UserError) as caught:
        read_layers(make(linear()))
    assert said in str(caught.value)
    assert caught.value.why
    assert "module" in caught.value.fix


def test_a_shared_random_stream_is_refused_but_not_streams_of_one_seed():
    rngs = nnx.Rngs(0)
    with pytest.raises(UserError, match=r"give each layer its own nnx\.Rngs"):
        read_layers([Noise(rngs), Noise(rngs)])
    assert len(read_layers([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])) == 2


def test_functions_and_modules_without_values_may_stand_anywhere():
    idle = nnx.Dropout(0.5, deterministic=True)
    assert len(read_layers([idle, nnx.relu, idle, nnx.relu, linear()])) == 5


@pytest.mark.parametrize(
    ("stages", "number", "fix"),
    [
        ([nnx.Linear, nnx.relu], 0, "write nnx.Linear(…)"),
        ([nnx.relu, linen.Dense], 1, "write nn.Dense(…)"),
        ([Noise], 0, "write Noise(…)"),
    ],
)
def test_a_class_in_the_place_of_a_module_is_refused(stages, number, fix):
    with pytest.raises(UserError, match=rf"stages\[{number}\] is the class ") as caught:
        read_layers(stages)
    assert caught.value.fix == fix


def test_a_class_that_is_no_module_is_a_function():
    assert read_layers([jnp.float32]) == [jnp.float32]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "there are no stages"),
        (nnx.Dropout(0.5), "stages is of type Dropout, not a list"),
        (nnx.Sequential(nnx.relu), "write stages=model.layers"),
        ("layers", "stages is of type str"),
        (nnx.relu, "write stages="),
    ],
)
def test_what_is_no_list_of_layers_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        read_layers(given)
