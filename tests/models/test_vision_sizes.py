"""The published models: as many parameters as reported, laid out on meshes unallocated."""

import gc
import math

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.config.compose import compose_config, validate
from meshwright.plan import make_plan
from meshwright.recipe import make_recipe, model_builder

COUNTS = {
    "resnet50": 25_557_032,
    "vit_b": 86_567_656,
    "vit_l": 304_326_632,
    "vit_1b": 1_012_611_432,
}
EVERYDAY = ("resnet50",)


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


@pytest.mark.parametrize(
    ("model", "blocks"), [pytest.param("vit_l", 24, marks=pytest.mark.full), ("vit_1b", 40)]
)
def test_models_of_one_and_two_blocks_tell_the_count_of_all(model, blocks):
    one, two = (count(f"model={model}", f"model.num_blocks={number}") for number in (1, 2))
    assert one + (blocks - 1) * (two - one) == COUNTS[model]


MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "pipe=2,data=4")
SHALLOW = {"resnet50": "model.depths=[2,1,1,1]"}
"""Settings for fewer blocks of the same sizes; two blocks, where a model has its own."""


def layouts():
    """Yield every model on every mesh: with few blocks, and whole."""
    for model in COUNTS:
        few = SHALLOW.get(model, "model.num_blocks=2")
        for mesh in MESHES:
            if mesh.startswith("pipe") and model == "resnet50":
                continue  # Its blocks differ too much for stages.
            yield pytest.param(model, mesh, (few,), id=f"{model} {mesh} shallow")
            yield pytest.param(model, mesh, (), id=f"{model} {mesh}")


# tests/models/test_published_sizes.py lays out a smaller model every day.
@pytest.mark.full
@pytest.mark.parametrize(("model", "mesh", "settings"), list(layouts()))
def test_a_published_model_is_laid_out_without_allocating_it(model, mesh, settings):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    assembled = laid_out(model, mesh, *settings)
    sizes = assembled.plan.mesh
    steps = zip(assembled.traced.layout.step_leaves, assembled.decision.at_rest, strict=True)
    leaves = [(step.leaf, placed) for step, placed in steps if step.leaf.role == "param"]
    whole = sum(leaf.nbytes for leaf, _ in leaves)
    held = sum(leaf.nbytes // placed.shards(sizes) for leaf, placed in leaves)
    # Replicas hold everything; what is divided leaves small arrays whole, such as biases.
    shares = math.prod(size for axis, size in sizes.items() if axis != "data")
    assert whole / shares <= held <= 1.02 * whole / shares
    if not settings:
        assert whole == 4 * COUNTS[model]
    gc.collect()
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in made) < 1000, "only the constants of the program"


def laid_out(model, mesh, *settings):
    stages = ["training.gradient_accumulation_steps=8"] if "pipe" in mesh else []
    axes = [f"mesh.{axis}" for axis in mesh.split(",")]
    fixed = ["training.micro_batch_size=1", "sharding.blocks=scan", *stages]
    config = validate(compose_config([f"model={model}", *axes, *fixed, *settings]))
    plan = make_plan(config, jax.device_count())
    recipe = make_recipe(config, plan.batch.global_batch_size)
    batch = recipe.task.example_batch(plan.batch.global_batch_size)
    return recipe.assemble(plan, batch)


def test_synthetic_images_have_the_size_of_the_model():
    settings = ["model=vit_b", "model.image_size=32", "model.num_classes=7"]
    config = validate(compose_config(settings))
    batch = make_recipe(config, 4).data.batch(0, 4)
    assert batch["image"].shape == (4, 32, 32, 3)
    assert batch["image"].dtype == np.float32
    assert batch["label"].max() < 7
