"""Losses that compare samples with each other, which microbatches change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.cli.auto_settings import config_estimator
from meshwright.config.compose import compose_config, validate
from meshwright.hardware import parse_hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.guidance.anti_patterns import find_anti_patterns
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.planner.search.search import search

BATCH = {name: np.zeros((64, 16), np.float32) for name in ("x", "y")}
MISTAKE = "comparisons within microbatches"


class Towers(nnx.Module):
    def __init__(self, rngs):
        self.left = nnx.Linear(16, 8, rngs=rngs)
        self.right = nnx.Linear(16, 8, rngs=rngs)


def similarities(model, batch):
    return model.left(batch["x"]) @ model.right(batch["y"]).T


def contrastive(model, batch):
    labels = jnp.arange(len(batch["x"]))
    scores = similarities(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def diagonal(model, batch):
    return -jnp.diag(jax.nn.log_softmax(similarities(model, batch))).mean()


def centered(model, batch):
    left = model.left(batch["x"])
    return ((left - left.mean(0)) ** 2).mean()


def by_sample(model, batch):
    scores = (model.left(batch["x"]) * model.right(batch["y"])).sum(-1)
    return jax.nn.softplus(-scores).mean()


def with_own_keys(model, batch):
    keys = jax.random.split(jax.random.key(0), len(batch["x"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
    return ((model.left(batch["x"]) + noise) ** 2).mean()


def mixing(loss):
    return Estimator(Towers, loss, optax.sgd(0.1), BATCH).sample_mixing


@pytest.mark.parametrize("loss", [contrastive, diagonal, centered])
def test_losses_that_compare_samples_are_found(loss):
    found = mixing(loss)
    assert found is not None
    assert found.combines


def test_losses_of_single_samples_are_not():
    assert mixing(by_sample) is None
    found = mixing(with_own_keys)
    assert found is not None
    assert not found.combines


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2_nano", "moe_tiny"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma3_tiny", "vit_tiny", "mlp", "vae", "lstm_tiny")
        ),
    ],
)
def test_known_models_do_not_compare_samples(name):
    config = validate(compose_config([f"model={name}", "data=synthetic"]))
    assert config_estimator(config, 8).sample_mixing is None


@pytest.mark.parametrize(("loss", "named"), [(contrastive, True), (by_sample, False)])
def test_microbatches_of_such_losses_are_named(loss, named):
    own = mw.Trainer(
        model=Towers, loss=loss, optimizer=optax.sgd(0.1), gradient_accumulation_steps=4
    )
    planned = own.plan(BATCH, hardware="2xH100", batch_size=64)
    found = {each.name: each.text for each in planned.report.mistakes}
    assert (MISTAKE in found) == named
    if named:
        assert "a step has 4 microbatches (gradient_accumulation_steps=4)" in found[MISTAKE]
        assert planned.plan.batch.sync_gradients_every == 1


def test_statistics_are_named_by_themselves():
    config = validate(compose_config(["model=conv", "data=synthetic"]))
    made = config_estimator(config, 8)
    assert made.sample_mixing is not None
    fixed = FixedSettings(mesh={"data": 2}, gradient_accumulation_steps=2)
    asked = PlanTask(parse_hardware("2xH100"), 8, fixed)
    found = find_anti_patterns(made, search(made, asked, top=1).best, None)
    assert [each.name for each in found] == ["statistics of microbatches"]
