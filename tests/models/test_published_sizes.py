"""The published models: as many parameters as their papers and reference code report."""

import math

import jax
import pytest
from flax import nnx

from meshwright.config.compose import compose_config, validate
from meshwright.recipe import model_builder

COUNTS = {
    "resnet50": 25_557_032,
    "vit_b": 86_567_656,
    "vit_l": 304_326_632,
    "vit_1b": 1_012_611_432,
}
EVERYDAY = ("resnet50", "vit_b")


def count(*settings):
    """Return the number of parameters of a model; nothing is allocated."""
    build = model_builder(validate(compose_config(settings)))
    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return sum(math.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize(
    "model",
    [m if m in EVERYDAY else pytest.param(m, marks=pytest.mark.full) for m in COUNTS],
)
def test_parameters_are_counted_as_published(model):
    assert count(f"model={model}") == COUNTS[model]


@pytest.mark.parametrize(("model", "blocks"), [("vit_l", 24), ("vit_1b", 40)])
def test_models_of_one_and_two_blocks_tell_the_count_of_all(model, blocks):
    one, two = (count(f"model={model}", f"model.num_blocks={number}") for number in (1, 2))
    assert one + (blocks - 1) * (two - one) == COUNTS[model]
