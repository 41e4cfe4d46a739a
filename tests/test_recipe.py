"""From a config to objects: every model we ship, and models, losses and data of one's own."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from models.published import PUBLISHED

from meshwright.config.compose import compose_config, validate
from meshwright.config.groups import group_options
from meshwright.config.schema import Config
from meshwright.errors import UserError
from meshwright.program.trace.traced_loss import read_loss
from meshwright.recipe import check_sections, learning_rate, make_optimizer, make_recipe

OWN = """
import flax.linen as nn
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, width: int = 8, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, width, rngs=rngs)
    def __call__(self, x):
        return self.layer(x)

class LinenNet(nn.Module):
    width: int = 8
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)

class Broken(nnx.Module):
    def __init__(self, rngs):
        raise KeyError("oh")

def loss(model, batch, *, scale: float = 1.0, width: int = 1):
    return scale * (model(batch["x"]) ** 2).mean() + width

class Lossless: pass

def data(step, batch_size, *, seed):
    return {"x": np.random.default_rng((seed, step)).normal(size=(batch_size, 4))}

def optimizer(learning_rate):
    return 3.0
"""


def config_of(*overrides: str) -> Config:
    return validate(compose_config(overrides))


def shapes_of_loss(recipe, batch_size: int = 8):
    """Return the shape of the loss on a batch, without computing anything."""
    batch = recipe.example_batch(batch_size)

    def run(batch):
        value, _ = read_loss(recipe.loss(recipe.model(nnx.Rngs(0)), batch))
        return value.total

    return jax.eval_shape(run, batch).shape


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_recipe.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


SHIPPED = [n for n in sorted(group_options()["model"]) if n not in (*PUBLISHED, "hf")]
EVERYDAY = ("lstm_tiny", "moe_tiny", "conv", "vae")


@pytest.mark.parametrize(
    "model", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in SHIPPED]
)
def test_every_model_we_ship_has_a_task_and_data_that_suit_it(model):
    config = config_of(f"model={model}")
    check_sections(config)
    if "num_blocks" in config.model.arguments():
        config = config_of(f"model={model}", "model.num_blocks=1")
    assert shapes_of_loss(make_recipe(config, 8)) == ()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.num_heads=5"],
            "hidden_size=64 is not divisible by num_heads=5; write",
        ),
        (["model=vit_tiny", "model.patch_size=5"], "write patch_size=4 or patch_size=7"),
        (["model=llama3_tiny", "model.num_kv_heads=3"], "write num_kv_heads=2 or num_kv_heads=4"),
        (["model.num_blocks=0"], "num_blocks=0 is less than 1"),
        (["model.dropout=1.5"], "dropout=1.5 is not a rate"),
        (["optimizer.beta1=0.8"], "did you mean `optimizer.b1`"),
        (["optimizer=adam"], "works by its name: optimizer.kind=adam"),
    ],
)
def test_sizes_that_do_not_fit_and_other_names_are_refused_without_building(overrides, said):
    with pytest.raises(UserError, match=re.escape(said)):
        check_sections(config_of(*overrides))


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ([], ("language_modeling", "text")),
        (["model=lstm_tiny"], ("language_modeling", "text")),
        (["model=conv"], ("classification", "digits")),
        (["model=vae"], ("reconstruction", "digits")),
        (["model=vae", "+experiment=quick_test"], ("reconstruction", "digits")),
        (["model=mlp", "task=reconstruction"], ("reconstruction", "digits")),
        (["task=reconstruction", "data=text", "model=mlp"], ("reconstruction", "text")),
    ],
)
def test_a_model_brings_its_task_and_data_unless_others_are_chosen(overrides, kinds):
    config = config_of(*overrides)
    assert (config.task.kind, config.data.kind) == kinds


def test_rows_are_as_long_as_the_models_context_or_else_the_tasks():
    def length(*overrides: str) -> int:
        return make_recipe(config_of(*overrides), 8).example_batch(2)["tokens"].shape[1] - 1

    assert length("model.context_length=16") == 16
    assert length("model=lstm_tiny", "task.context_length=24") == 24
    assert length("data.sequence_length=8") == 8


def test_rows_of_models_with_long_contexts_have_2048_tokens_unless_more_are_asked_for():
    def length(*overrides: str) -> int:
        config = config_of("model=llama3_8b", *overrides)
        return make_recipe(config, 8).example_batch(2)["tokens"].shape[1] - 1

    assert length() == length("data=synthetic") == 2048
    assert length("data=synthetic", "task.context_length=4096") == 4096
    assert length("data.sequence_length=2500") == 2500


@pytest.mark.parametrize("overrides", [["data=text"], ["data=synthetic"], ["model=mlp"]])
def test_batches_hold_32_bit_numbers(overrides):
    batch = make_recipe(config_of(*overrides), 8).data.batch(0, 2)
    assert {array.dtype.itemsize for array in batch.values()} == {4}


@pytest.mark.parametrize("model", ["Net", "LinenNet"])
def test_ones_own_model_loss_and_data(own, model):
    config = config_of(
        f"model.kind=own_recipe:{model}",
        "model.width=16",
        "task.kind=own_recipe:loss",
        "task.scale=2",
        "data.kind=own_recipe:data",
        "run.seed=5",
    )
    check_sections(config)
    recipe = make_recipe(config, 8)
    batch = recipe.data.batch(3, 2)
    np.testing.assert_array_equal(batch["x"], np.random.default_rng((5, 3)).normal(size=(2, 4)))
    net = recipe.model(nnx.Rngs(0))
    # The loss follows the model's width, which it shares by name.
    assert recipe.loss(net, batch) == 2 * (net(batch["x"]) ** 2).mean() + 16
    assert shapes_of_loss(recipe) == ()


@pytest.mark.parametrize(
    ("overrides", "what", "why"),
    [
        (["task.kind=own_recipe:Lossless"], "task.kind=own_recipe:Lossless has no loss", ""),
        (["task.kind=own_recipe:data"], "`task.seed` is missing", ""),
        (["task.kind=own_recipe:loss", "data=synthetic"], "cannot make batches", ""),
        (["data.kind=own_recipe:Lossless"], "data.kind=own_recipe:Lossless returns no batches", ""),
        (["optimizer.kind=own_recipe:optimizer"], "the optimizer is 3.0", ""),
        (["model=vit_tiny", "model.patch_size=8"], "model.kind=vit cannot be built", "ValueError"),
        (
            ["model.kind=own_recipe:Broken"],
            "model.kind=own_recipe:Broken cannot be built",
            "own_recipe.py, line 20: KeyError: 'oh'",
        ),
        (
            ["model.kind=own_recipe:Net"],
            "task.kind=language_modeling fails on model.kind=own_recipe:Net",
            "own_recipe.py, line 10: TypeError",
        ),
        (
            ["data.sequence_length=200"],
            "sequence_length=200 is more than the model has",
            "it has 64 positions (context_length=64)",
        ),
    ],
)
def test_what_does_not_fit_is_a_mistake_of_the_config(own, overrides, what, why):
    with pytest.raises(UserError) as caught:
        shapes_of_loss(make_recipe(config_of(*overrides), 8))
    assert what in caught.value.what
    assert why in caught.value.why


def test_the_learning_rate_rises_and_falls_to_zero():
    config = config_of(
        "optimizer.learning_rate=2", "optimizer.warmup_steps=4", "training.steps=12",
        "optimizer.schedule=cosine",
    )  # fmt: skip
    rate = learning_rate(config, 8, 12)
    expected = [0.0, 1.0, 2.0, 1.0, 0.0]
    np.testing.assert_allclose([rate(n) for n in (0, 2, 4, 8, 12)], expected, atol=1e-6)
    scaled = config_of("optimizer.learning_rate=2", "optimizer.warmup_steps=0",
        "optimizer.schedule=constant", "optimizer.scale_learning_rate=sqrt",
        "optimizer.base_batch_size=2",
    )  # fmt: skip
    assert learning_rate(scaled, 8, None)(0) == 4.0


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=[pytest.mark.full] * (k in ("lion", "sgd")))
        for k in group_options()["optimizer"]
    ],
)
def test_every_optimizer_we_ship_updates_a_matrix(kind):
    optimizer = make_optimizer(config_of(f"optimizer={kind}"), optax.constant_schedule(1e-3))
    params = {"w": jax.ShapeDtypeStruct((4, 6), np.float32)}

    def update(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    assert jax.eval_shape(update, params)["w"].shape == (4, 6)
