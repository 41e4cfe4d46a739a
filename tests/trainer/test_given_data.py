"""Training, evaluation and prediction on the data people have, compared with NumPy."""

import json
import warnings

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from library_standins import DataLoader, Table, TensorFlowDataset, TorchDataset
from quick import quick_module

import meshwright as mw
from meshwright.data.order import sample_ids

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

COUNT, SIZE, RATE = 20, 8, 0.1
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=COUNT).astype("float32")
ARRAYS = {"x": X, "y": Y}
SAMPLES = [{"x": X[n], "y": Y[n]} for n in range(COUNT)]
GRAIN = grain.MapDataset.source(SAMPLES)


class Line(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jax.numpy.zeros(3))

    def __call__(self, x):
        return x @ self.weight[...]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def absolute(model, batch):
    distance = abs(model(batch["x"]) - batch["y"])
    return distance.mean(), {"worst": distance.mean()}


@pytest.fixture(scope="module")
def trainer(quick_module):
    return mw.Trainer(
        model=Line, loss=loss, optimizer=optax.sgd(RATE), devices=jax.devices()[:2], log_every=1
    )


def by_hand(order):
    """Train in NumPy on the samples of each step; return the weights."""
    weight = np.zeros(3)
    for chosen in order:
        error = X[chosen].astype("float64") @ weight - Y[chosen]
        weight -= RATE * 2 * error @ X[chosen] / len(chosen)
    return weight


def seeded(steps):
    return [
        sample_ids(seed=0, step=step, batch_size=SIZE, num_samples=COUNT) for step in range(steps)
    ]


def in_order(steps):
    return np.resize(np.arange(COUNT), steps * SIZE).reshape(steps, SIZE)


def whole_batches(steps):
    return [np.arange(SIZE) + SIZE * (step % 2) for step in range(steps)]


def generate():
    yield from SAMPLES


FORMS = {
    "torch dataset": (lambda: TorchDataset(ARRAYS), SIZE, seeded(5)),
    "table": (lambda: Table({"x": X.tolist(), "y": Y.tolist()}), SIZE, seeded(5)),
    "list of samples": (lambda: SAMPLES, SIZE, seeded(5)),
    "Grain": (lambda: GRAIN, SIZE, in_order(5)),
    "Grain stream": (lambda: GRAIN.to_iter_dataset(), SIZE, in_order(5)),
    "generator function": (lambda: generate, SIZE, in_order(5)),
    "tf.data": (lambda: TensorFlowDataset(SAMPLES), SIZE, in_order(5)),
    "Grain batches": (lambda: GRAIN.batch(SIZE), None, whole_batches(4)),
    "DataLoader": (lambda: DataLoader(TorchDataset(ARRAYS), SIZE), None, whole_batches(4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_two_epochs_of_any_form_train_as_numpy_does(trainer, form):
    make, size, order = FORMS[form]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trainer.fit(make(), epochs=2, batch_size=size, restart=True)
    short = [str(w.message) for w in caught if "instead of 8" in str(w.message)]
    assert len(short) == (size is None)
    assert result.steps == len(order)
    assert result.stop.reason is mw.StopReason.ALL_STEPS
    np.testing.assert_allclose(result.params["weight"], by_hand(order), rtol=1e-5)


@pytest.mark.parametrize("form", ["torch dataset", "table", "Grain", "tf.data", "DataLoader"])
def test_every_sample_is_evaluated_and_predicted_once(trainer, form):
    result = trainer.fit(ARRAYS, steps=3, batch_size=SIZE, restart=True)
    weight = by_hand(seeded(3))
    data = FORMS[form][0]()
    values = result.evaluate(data)
    assert values["eval_samples"] == COUNT
    assert values["loss"] == pytest.approx(((X @ weight - Y) ** 2).mean(), rel=1e-5)
    predicted = trainer.predict(data, lambda model, batch: model(batch["x"]))
    np.testing.assert_allclose(predicted, X @ weight, rtol=1e-4, atol=1e-5)


def test_lists_of_batches_and_generators_end_or_begin_again_as_asked(trainer):
    batches = [{"x": X[n : n + 4], "y": Y[n : n + 4]} for n in range(0, COUNT, 4)]
    order = np.resize(np.arange(COUNT), (15, 4))
    result = trainer.fit(batches, epochs=3, restart=True)
    np.testing.assert_allclose(result.params["weight"], by_hand(order), rtol=1e-5)
    with pytest.warns(UserWarning, match="ran out after 5 of 8 steps"):
        trainer.fit(iter(batches), steps=8, restart=True)
    with pytest.raises(mw.UserError, match="2 epochs need data that can be read again"):
        trainer.fit(generate(), epochs=2, batch_size=SIZE, restart=True)


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_grain_stream_resumes_bit_for_bit_where_it_was(trainer, tmp_path, batched):
    read = []

    def note(sample):
        read.append(float(sample["y"]))
        return sample

    def make():
        stream = GRAIN.shuffle(seed=4).to_iter_dataset().map(note)
        return stream.batch(SIZE, drop_remainder=True) if batched else stream

    size = None if batched else SIZE
    whole = trainer.fit(make(), steps=7, batch_size=size, restart=True)
    trainer.fit(make(), steps=4, batch_size=size, run_dir=tmp_path, restart=True)
    before = len(read)
    resumed = trainer.fit(make(), steps=7, batch_size=size, run_dir=tmp_path, resume="must")
    np.testing.assert_array_equal(resumed.params["weight"], whole.params["weight"])
    assert resumed.losses == {step: whole.losses[step] for step in (5, 6, 7)}
    # The position was restored: the four batches before it were not read again.
    assert len(read) - before < 4 * SIZE + 2 * SIZE


def test_a_mixture_resumes_bit_for_bit_also_with_other_weights(trainer, tmp_path):
    def mixed(*weights):
        parts = {"a": {"x": X[:12], "y": Y[:12]}, "b": {"x": X[12:], "y": Y[12:]}}
        return mw.mix(parts, weights=dict(zip("ab", weights, strict=True)))

    def fit(data, steps, folder=None, **settings):
        settings |= {"batch_size": SIZE, "run_dir": folder}
        return trainer.fit(data, steps=steps, eval_data=mixed(1, 1), **settings)

    whole = fit(mixed(3, 1), 5, restart=True)
    first = fit(mixed(3, 1), 3, tmp_path, restart=True)
    resumed = fit(mixed(3, 1), 5, tmp_path / "same", resume=str(tmp_path))
    np.testing.assert_array_equal(resumed.params["weight"], whole.params["weight"])
    errors = (X @ np.array(whole.params["weight"]) - Y) ** 2
    found = resumed.evaluate(mixed(1, 1))
    assert found["loss.a"] == pytest.approx(errors[:12].mean(), rel=1e-5)
    assert found["loss.b"] == pytest.approx(errors[12:].mean(), rel=1e-5)
    assert found["loss"] == pytest.approx(errors.mean(), rel=1e-5)
    # With other weights, rows that no source has given before, in its own order.
    other = fit(mixed(1, 3), 5, tmp_path / "other", resume=str(tmp_path))
    weight = np.array(first.params["weight"], "float64")
    given, sizes = [18, 6], (12, 8)
    for _ in range(2):
        a, b = (
            start + sample_ids(seed=0, step=0, batch_size=1, num_samples=size, rows=rows)
            for start, size, rows in zip(
                (0, 12), sizes, (given[0] + np.arange(2), given[1] + np.arange(6)), strict=True
            )
        )
        given = [given[0] + 2, given[1] + 6]
        chosen = np.concatenate([a, b])
        error = X[chosen].astype("float64") @ weight - Y[chosen]
        weight -= RATE * 2 * error @ X[chosen] / SIZE
    np.testing.assert_allclose(
        other.params["weight"], weight, rtol=0, atol=1e-6 * abs(weight).max()
    )
    events = map(json.loads, (tmp_path / "other/events.jsonl").read_text().splitlines())
    (mixture,) = [event for event in events if event["kind"] == "mixture"]
    assert mixture["rows"] == {"a": [22, 22.0], "b": [18, 18.0]}


def test_a_loader_that_shuffles_warns_that_resuming_changes_the_order(trainer, tmp_path):
    batches = TorchDataset({"x": X[:16], "y": Y[:16]})
    shuffled = DataLoader(batches, SIZE, shuffle=True)
    with pytest.warns(UserWarning, match=r"fit\(loader.dataset, batch_size=8\) resumes") as caught:
        trainer.fit(shuffled, steps=1, restart=True, run_dir=tmp_path, progress=False)
    assert len(caught) == 1
    seeded = DataLoader(batches, SIZE, shuffle=True, generator=object())
    for loader in (seeded, DataLoader(batches, SIZE)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit(loader, steps=1, restart=True)


def test_evaluations_early_stopping_and_the_best_checkpoint_go_by_the_eval_loss(tmp_path):
    own = mw.Trainer(
        model=Line,
        loss=loss,
        eval_loss=absolute,
        optimizer=optax.sgd(RATE),
        devices=jax.devices()[:2],
        run_name="by distance",
    )
    stopping = mw.EarlyStopping(1, min_delta=10.0)
    result = own.fit(
        SAMPLES,
        steps=9,
        batch_size=SIZE,
        eval_data=GRAIN,
        eval_every=1,
        callbacks=[stopping],
        run_dir=tmp_path,
        progress=False,
    )
    assert result.steps == 2
    for step, values in result.eval.items():
        distance = abs(X @ by_hand(seeded(step)) - Y).mean()
        assert values["loss"] == values["worst"] == pytest.approx(distance, rel=1e-5)
    assert own.evaluate(GRAIN) == result.eval[2]
    assert own.evaluate(GRAIN, of=tmp_path) == result.eval[2]
    assert json.loads((tmp_path / "run.json").read_text())["name"] == "by distance"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_loss": 3}, "the eval_loss is 3, of type int"),
        ({"run_name": ""}, "run_name= is not a name"),
        ({"run_name": 7}, "run_name=7 is not a name"),
    ],
)
def test_what_is_no_eval_loss_and_no_name_is_refused(settings, message):
    with pytest.raises(mw.UserError, match=message):
        mw.Trainer(model=Line, loss=loss, optimizer=optax.sgd(RATE), **settings)
