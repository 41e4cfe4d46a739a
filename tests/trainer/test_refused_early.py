"""What cannot work is refused before the first step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def mean_square(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def fit(data, loss=mean_square, **settings):
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh="data=2,fsdp=4",
        log_every=1,
    )
    return trainer.fit(data, **{"batch_size": 8, "steps": 2} | settings)


DATA = {"x": X, "y": Y}


@pytest.mark.parametrize(
    ("eval_data", "message"),
    [
        ({"x": X}, "other arrays than the training data"),
        ({"x": X, "y": Y.astype(int)}, "`y` of the data to evaluate on is int32"),
        ([], "no data to evaluate on"),
    ],
    ids=["missing", "type", "empty"],
)
def test_data_to_evaluate_on(tmp_path, eval_data, message):
    with pytest.raises(mw.UserError, match=message):
        fit(DATA, eval_data=eval_data, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_every_few_steps_without_data():
    with pytest.raises(mw.UserError, match="eval_every is given, and there is no data"):
        fit(DATA, eval_every=2)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate"])
def test_a_metric_with_the_name_of_one_that_every_training_has(name):
    with pytest.raises(mw.UserError, match=f"metric named `{name}`"):
        fit(DATA, lambda model, batch: (mean_square(model, batch), {name: jnp.ones(())}))


def test_a_loss_of_whole_numbers():
    with pytest.raises(mw.UserError, match="the loss is of type int32"):
        fit(DATA, lambda model, batch: (model(batch["x"]) > 0).sum())


def test_a_short_last_batch_of_a_list_is_left_out_with_a_warning():
    batches = [{"x": X[at : at + 8], "y": Y[at : at + 8]} for at in (0, 8, 16)]
    with pytest.warns(UserWarning, match="the last batch of the data has 4 samples instead of 8"):
        result = fit(batches, batch_size=None, steps=None, epochs=2)
    assert result.steps == 4


def test_a_loss_that_no_parameter_changes_is_warned_about():
    with pytest.warns(UserWarning, match="the gradient of the first step is zero"):
        fit(DATA, lambda model, batch: (model(batch["x"]) > 0).mean())


def test_an_error_ends_with_its_own_message():
    with pytest.raises(mw.UserError) as caught:
        fit(DATA, lambda model, batch: model(batch["x"]))
    assert not getattr(caught.value, "__notes__", [])


def test_samples_to_evaluate_on_may_have_numbers():
    def samples():
        for x, y in zip(X, Y, strict=True):
            yield {"x": x, "y": float(y[0])}

    def loss(model, batch):
        return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

    result = fit({"x": X, "y": Y[:, 0]}, loss, eval_data=samples, eval_batches=2)
    assert result.eval[2]["eval_samples"] == 2 * 8
