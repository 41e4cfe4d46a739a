"""What callbacks read of a run and ask for, and the learning rate inside optax optimizers."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.config.schema import CheckpointConfig
from meshwright.trainer.starting.learning_rate import find_schedule

DATA = {"x": np.random.default_rng(0).normal(size=(32, 4)).astype("float32")}
COSINE = optax.cosine_decay_schedule(0.1, 10)


def trainer(optimizer, **settings):
    return mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optimizer,
        log_every=1,
        mesh="data=1",
        devices=jax.devices()[:1],
        **settings,
    )


class Watching(mw.Callback):
    """Notes the learning rate and the size of the model, saves once, and stops."""

    def __init__(self):
        self.seen = []

    def on_start(self, step):
        self.before = np.asarray(self.context.model.kernel[...]).copy()

    def on_log(self, step, values):
        assert self.context.metrics == values
        self.seen.append((step, self.context.learning_rate))
        self.kernel = np.asarray(self.context.model.kernel[...]).copy()
        self.at = self.context.step
        if step == 3:
            self.context.save()
        if step == 6:
            self.context.stop("seen enough")

    def on_eval(self, step, values):
        assert self.context.eval_metrics == values


def test_a_callback_reads_the_model_and_saves_and_stops(tmp_path):
    watching = Watching()
    result = trainer(optax.sgd(COSINE)).fit(
        DATA,
        batch_size=8,
        steps=20,
        callbacks=[watching],
        run_dir=tmp_path,
        eval_data=DATA,
        checkpoint=CheckpointConfig(every=1000),
        progress=False,
    )
    assert (result.stop.reason, result.stopped) == (mw.StopReason.CALLBACK, "seen enough")
    # Metrics are looked at one step late, so a request made then is met after the next one.
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "7"}
    np.testing.assert_array_equal(watching.kernel, np.asarray(result.model.kernel[...]))
    assert watching.at == result.steps == 7
    assert not np.array_equal(watching.before, watching.kernel)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(COSINE),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(COSINE, momentum=0.9)),
        optax.inject_hyperparams(optax.adam)(learning_rate=COSINE),
    ],
    ids=["schedule", "in a chain", "injected"],
)
@pytest.mark.full
def test_the_learning_rate_inside_of_optax_is_logged(optimizer):
    rates = {}
    trainer(optimizer).fit(
        DATA,
        batch_size=8,
        steps=6,
        on_metrics=lambda step, values: rates.update({step: values["learning_rate"]}),
    )
    np.testing.assert_allclose(
        list(rates.values()), [float(COSINE(step)) for step in range(6)], rtol=1e-6
    )


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(3e-3), optax.sgd(3e-3), optax.chain(optax.clip(1.0), optax.lion(3e-3))],
)
def test_a_constant_learning_rate_is_found(optimizer):
    schedule = find_schedule(optimizer)
    assert schedule is not None
    assert schedule(7) == 3e-3


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.sgd(0.1), optax.scale(0.5)),
        optax.chain(optax.sgd(COSINE), optax.sgd(optax.linear_schedule(1.0, 0.0, 5))),
        optax.MultiSteps(optax.sgd(COSINE), 2).gradient_transformation(),
    ],
    ids=["two scales", "two schedules", "every other step"],
)
def test_nothing_is_said_about_a_rate_that_cannot_be_found(optimizer):
    assert find_schedule(optimizer) is None
