"""The language models in their published sizes: parameters, and layouts on meshes, unallocated."""

import math

import jax
import pytest
from flax import nnx
from models.published import PUBLISHED

from meshwright.config.compose import compose_config, validate
from meshwright.config.groups import group_options
from meshwright.ledgers import lower_step
from meshwright.plan import make_plan
from meshwright.recipe import make_recipe, model_builder

TINY = ("gemma3_tiny", "llama3_tiny", "qwen3_tiny")
MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "pipe=2,data=4")
LEFT_OVER = {"gemma3_1b": 2, "gemma3_4b": 4, "gemma3_27b": 2}
"""Blocks after the last global one, which run after those of the stages."""


def config_of(*overrides):
    return validate(compose_config([*overrides, "data=synthetic"]))


def count(parameters):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def test_every_file_of_a_language_model_is_tested_here():
    families = ("gpt2", "gemma", "llama", "mistral", "phi", "qwen")
    files = {name for name in group_options()["model"] if name.startswith(families)}
    assert files == {*PUBLISHED, *TINY, "gpt2_tiny", "gpt2_nano"}


EVERYDAY = ("gpt2", "gemma3_1b")


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in PUBLISHED]
)
def test_parameters_are_as_many_as_published(name):
    """Every block is the same size, so one of them is counted."""
    blocks = config_of(f"model={name}").model.arguments()["num_blocks"]
    build = model_builder(config_of(f"model={name}", "model.num_blocks=1"))
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    block = count(nnx.state(model.blocks[0], nnx.Param))
    assert count(nnx.state(model, nnx.Param)) + (blocks - 1) * block == PUBLISHED[name]


def assemble(name, mesh):
    config = config_of(
        f"model={name}", f"mesh={mesh}", "training.global_batch_size=16", "sharding.blocks=scan"
    )
    recipe = make_recipe(config, 16)
    return recipe.assemble(make_plan(config, 8), recipe.example_batch(16))


def check_layout(name, mesh):
    """Check that a step is laid out on a mesh, its blocks rolled, and nothing is allocated."""
    before = {id(array) for array in jax.live_arrays()}
    assembled = assemble(name, mesh)
    arrays = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in arrays) < 1e6
    steps = assembled.traced.layout.select("param")
    placed = [assembled.decision.optimizer[step_number(assembled, step)] for step in steps]
    parts = sum(
        step.leaf.nbytes / math.prod(assembled.plan.size(axis) for axis in placement.axes())
        for step, placement in zip(steps, placed, strict=True)
    )
    leaves = [leaf for leaf in assembled.traced.layout.leaves if leaf.role == "param"]
    whole = sum(leaf.nbytes for leaf in leaves)
    assert whole == 4 * PUBLISHED.get(name, whole / 4)
    if "pipe" in mesh:
        # The shorter stage is padded to the length of the longer one.
        assert parts < 1.02 * sum(step.leaf.nbytes for step in steps) / 2
    elif mesh != "data=8":
        odd = odd_paths(name) if "tensor" in mesh else ()
        undivided = sum(leaf.nbytes for leaf in leaves if leaf.path.endswith(odd))
        assert parts < 1.02 * (whole + undivided) / 8
    return assembled


def odd_paths(name):
    """Return how the paths of weights end that tensor=2 cannot divide."""
    sizes = config_of(f"model={name}").model.arguments()
    heads = sizes["num_heads"]
    odd = {
        ".query.kernel": heads,
        ".out.kernel": heads,
        ".key.kernel": sizes.get("num_kv_heads") or heads,
        ".value.kernel": sizes.get("num_kv_heads") or heads,
        "tokens.embedding": sizes["vocab_size"],
    }
    return tuple(path for path, size in odd.items() if size % 2)


def step_number(assembled, step):
    return assembled.traced.layout.step_leaves.index(step)


def check_stages(assembled, name):
    stages = assembled.pipeline_report.stages
    blocks = [number for stage in stages for number in stage.blocks]
    total = config_of(f"model={name}").model.arguments()["num_blocks"]
    assert blocks == list(range(total - LEFT_OVER.get(name, 0)))
    assert all(stage.blocks for stage in stages)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("gemma3_tiny", "pipe=2,data=4", marks=pytest.mark.full),
        pytest.param("llama3_tiny", "fsdp=4,tensor=2", marks=pytest.mark.full),
        ("qwen3_tiny", "fsdp=8"),
    ],
)
def test_tiny_sizes_are_laid_out(name, mesh):
    assembled = check_layout(name, mesh)
    if "pipe" in mesh:
        check_stages(assembled, name)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_laid_out_on_every_mesh_without_being_allocated(name, mesh):
    assembled = check_layout(name, mesh)
    if "pipe" in mesh:
        check_stages(assembled, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3_4b", "gemma3_12b", "gemma3_27b"])
def test_the_steps_of_large_models_are_lowered_without_being_allocated(name):
    before = {id(array) for array in jax.live_arrays()}
    assembled = assemble(name, "fsdp=8")
    lowered = lower_step(assembled, make_recipe(config_of(f"model={name}"), 16).example_batch(16))
    arrays = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in arrays) < 1e6
    # Adam has two numbers for every parameter, and there is little else.
    inputs = jax.tree.leaves(lowered.args_info)
    numbers = sum(math.prod(each.shape) for each in inputs)
    assert numbers == pytest.approx(3 * PUBLISHED[name], rel=1e-4)
    assert all(each.donated for each in inputs if math.prod(each.shape) > 1e6)
    # One program of the blocks that repeat, not one for each.
    assert len(lowered.as_text()) < 4e6
