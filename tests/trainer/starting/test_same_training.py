"""A run from Python that goes on in an old folder must train the same, or says what differs."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.trainer.starting.same_training import training_facts

BATCH = {
    "x": np.arange(64, dtype=np.float32).reshape(16, 4) / 64,
    "y": np.ones((16, 1), np.float32),
}


def squares(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def doubled(model, batch):
    return 2 * ((model(batch["x"]) - batch["y"]) ** 2).mean()


def trainer(rate=0.1, loss=squares, mesh="fsdp=8", **settings):
    return mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(rate),
        mesh=mesh,
        **settings,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer().fit([BATCH] * 3, steps=2, run_dir=folder, progress=False)
    return folder


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate": 0.2}, "the learning rate after 0 steps was 0.1 and is 0.2"),
        ({"rate": optax.linear_schedule(0.1, 0.0, 50)}, "does not fit the optimizer"),
        ({"loss": doubled}, "the model or the loss computes something else"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"clip_norm": 1.0}, "clip_norm was None and is 1.0"),
    ],
    ids=["rate", "schedule", "loss", "seed", "clip_norm"],
)
def test_other_training_is_refused_by_name(run, changed, said):
    with pytest.raises(mw.UserError, match=re.escape(said)):
        trainer(**changed).fit([BATCH] * 3, steps=3, run_dir=run, progress=False)


def test_schedules_of_other_code_are_compared_by_their_rates(tmp_path):
    trainer(lambda step: 0.1 / (1 + step)).fit(
        [BATCH] * 3, steps=1, run_dir=tmp_path, progress=False
    )
    with pytest.raises(mw.UserError, match=r"learning rate after 1 step was 0.05 and is 0.025"):
        trainer(lambda step: 0.1 / (1 + step) ** 2).fit(
            [BATCH] * 3, steps=2, run_dir=tmp_path, progress=False
        )


@pytest.mark.full
def test_the_same_training_goes_on_on_another_mesh(run, tmp_path):
    for mesh in ("fsdp=8", "data=8"):
        result = trainer(mesh=mesh).fit(
            [BATCH] * 3, steps=3, run_dir=tmp_path / mesh, resume=str(run), progress=False
        )
        assert result.steps == 3


def test_what_cannot_be_compared_is_said(run, tmp_path, capfd):
    trainer(loss=doubled, mesh="data=8", gradient_accumulation_steps=2).fit(
        [BATCH] * 3, steps=3, run_dir=tmp_path, resume=str(run), progress=True
    )
    assert "samples per microbatch changed" in capfd.readouterr().err


def test_a_loss_with_another_constant_is_another_loss():
    facts = []
    for array in (jnp.ones(4), jnp.zeros(4), jnp.ones(4)):
        made = trainer(loss=lambda model, batch, a=array: (model(batch["x"] + a) ** 2).mean())
        facts.append(training_facts(made, made.assemble(BATCH)))
    assert facts[0]["loss"] == facts[2]["loss"] != facts[1]["loss"]


def test_steps_after_the_end_of_a_schedule_are_named(tmp_path):
    rate = optax.cosine_decay_schedule(0.1, 2)
    trainer(rate).fit([BATCH] * 4, steps=2, run_dir=tmp_path, progress=False)
    with pytest.warns(UserWarning, match="is 0 from step 3 to step 4: the schedule ends after 2"):
        trainer(rate).fit([BATCH] * 4, steps=4, run_dir=tmp_path, progress=False)
