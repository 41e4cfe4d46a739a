"""A loss that changes with microbatches, or broadcasts by mistake, is named before training."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_models import Residuals

import meshwright as mw

BATCH = {
    "x": np.ones((16, 16), np.float32),
    "y": np.ones(16, np.float32),
    "label": np.zeros(16, np.int32),
}


def mean(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def total(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum()


def ratio(model, batch):
    return total(model, batch) / batch["y"].sum()


def weighted(model, batch):
    return mw.Weighted(total(model, batch), batch["y"].sum())


def contrastive(model, batch):
    rows = model(batch["x"])
    labels = jnp.arange(len(rows))
    return optax.softmax_cross_entropy_with_integer_labels(rows @ rows.T, labels).mean()


def decayed(model, batch):
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    return mean(model, batch) + 1e-3 * sum((leaf**2).sum() for leaf in params)


def remarks(loss, **settings):
    trainer = mw.Trainer(
        model=lambda rngs: Residuals(2, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(0.1),
        **settings,
    )
    return trainer.assemble(BATCH).remarks


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "data=8", "gradient_accumulation_steps": 2},
        {"mesh": "data=4,pipe=2", "pipeline": {"num_microbatches": 4}},
    ],
    ids=["accumulated", "pipe"],
)
def test_a_loss_that_is_no_mean_is_named(settings):
    for loss in (mean, weighted, *[decayed] * ("pipeline" not in settings)):
        assert not any("mean over samples" in each for each in remarks(loss, **settings))
    said = {total: "a sum over samples that is not divided", ratio: "its div", contrastive: "dot"}
    for loss, why in said.items():
        found = [each for each in remarks(loss, **settings) if "mean over samples" in each]
        assert len(found) == 1
        assert why in found[0]
        assert "mw.Weighted" in found[0]
    assert not any("mean over" in each for each in remarks(total, mesh="data=8"))


def test_a_sum_over_four_microbatches_is_a_quarter():
    def loss_of(count):
        trainer = mw.Trainer(
            model=lambda rngs: nnx.Linear(16, 1, rngs=rngs),
            loss=total,
            optimizer=optax.sgd(0.0),
            mesh="data=1",
            devices=jax.devices()[:1],
            gradient_accumulation_steps=count,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trainer.fit([BATCH], steps=1).losses[1]

    assert loss_of(4) == pytest.approx(loss_of(1) / 4)


def columns(model, batch):
    return ((model(batch["x"])[:, :1] - batch["y"]) ** 2).mean()


def masked(model, batch):
    return (batch["y"] * (model(batch["x"])[:, :1] ** 2)).mean()


def on_purpose(model, batch):
    return ((model(batch["x"])[:, 0][:, None] - batch["y"][None, :]) ** 2).mean()


def test_a_row_and_a_column_that_meet_by_mistake_are_named():
    for loss in (columns, masked):
        assert any("(n,) with one of shape (n, 1)" in each for each in remarks(loss))
    for loss in (on_purpose, mean, contrastive):
        assert not any("(n, 1)" in each for each in remarks(loss))
