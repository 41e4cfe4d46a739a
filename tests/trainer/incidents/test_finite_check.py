"""States that are not finite: never saved, never the best, and named by where they began."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.checkpoint import CheckpointReader, read_params
from meshwright.cli.main import main
from meshwright.errors import UserError

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def batches(*, nan_at=None, key="x"):
    """Batches whose values are NaN from one step on, counted from 1."""
    return [
        {"x": X, "scale": np.ones((8, 1), np.float32)}
        | ({key: np.full_like(X[:, : 4 if key == "x" else 1], np.nan)} if u == nan_at else {})
        for u in range(1, 13)
    ]


def square(model, batch):
    return (model(batch["x"]) ** 2 * batch["scale"]).mean()


def fit(
    folder, data, *, loss=square, optimizer=None, steps=12, keep_last=2, accept=False, **settings
):
    policy = {n: settings.pop(n) for n in ("on_nonfinite", "precision") if n in settings}
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        loss=loss,
        optimizer=optimizer or optax.sgd(0.01),
        mesh="fsdp=8",
        log_every=100,
        **policy,
    )
    checkpoint = mw.CheckpointConfig(
        every=1, keep_last=keep_last, keep_best=1, accept_changes=accept
    )
    return trainer.fit(
        data, steps=steps, run_dir=folder, checkpoint=checkpoint, progress=False, **settings
    )


def saved(folder):
    return CheckpointReader(folder / "checkpoints").steps()


def assert_all_finite(folder):
    for step in saved(folder):
        assert all(np.isfinite(v).all() for v in read_params(folder, step=step).values())


def test_a_diverged_run_keeps_its_good_checkpoints(tmp_path):
    with pytest.raises(UserError, match="the loss is nan at step 6"):
        fit(tmp_path, batches(nan_at=6))
    assert saved(tmp_path) == [4, 5]
    assert_all_finite(tmp_path)
    # With other data, the state of step 5 goes on as if nothing had happened.
    assert fit(tmp_path, batches(), accept=True).steps == 12


def test_the_report_says_that_it_diverged(tmp_path, capfd):
    with pytest.raises(UserError):
        fit(tmp_path, batches(nan_at=6))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert '"failure": "failed: the loss is nan at step 6"' in page.replace('":"', '": "')


def test_the_gradient_may_be_the_first_to_go(tmp_path):
    def steep(model, batch):
        # The root of zero has a value, and no derivative.
        root = jnp.sqrt((model(batch["x"]) ** 2 + 1) * (batch["scale"] - 1))
        return square(model, batch | {"scale": jnp.ones_like(batch["scale"])}) + root.mean()

    data = batches()
    for step, batch in enumerate(data, 1):
        batch["scale"] = batch["scale"] * (1 if step == 4 else 3)
    with pytest.raises(UserError, match="the gradient is not finite at step 4") as caught:
        fit(tmp_path, data, loss=steep)
    assert "the gradient norm nan" in caught.value.why
    assert saved(tmp_path) == [2, 3]
    assert_all_finite(tmp_path)


def test_an_optimizer_that_spoils_the_state_is_found_before_it_is_saved(tmp_path):
    def rate(count):
        return jnp.where(count == 3, jnp.inf, 0.01)

    with pytest.raises(UserError, match="the state is not finite after step 4") as caught:
        fit(tmp_path, batches(), optimizer=optax.sgd(rate), steps=4)
    assert "what the optimizer made of them is not" in caught.value.why
    assert saved(tmp_path) == [2, 3]


def test_an_optimizer_that_drops_bad_gradients_goes_on(tmp_path):
    def steep(model, batch):
        # The biases start at zero, where a root has no derivative.
        return square(model, batch) + jnp.sqrt(model.bias**2).sum()

    optimizer = optax.chain(optax.zero_nans(), optax.sgd(0.01))
    policy = {"on_nonfinite": "apply", "steps": 3}
    assert fit(tmp_path, batches(), loss=steep, optimizer=optimizer, **policy).steps == 3
    assert saved(tmp_path) == [2, 3]


def test_skipped_steps_of_fp16_are_saved(tmp_path):
    result = fit(tmp_path, batches(nan_at=3), precision="fp16", steps=4)
    assert result.steps == 4
    assert int(result.state.loss_scale.skipped) == 1
    assert saved(tmp_path) == [3, 4]
    assert_all_finite(tmp_path)


def test_an_evaluation_that_is_not_finite_is_never_the_best(tmp_path):
    class Poisoned(mw.Callback):
        """Spoils the held-out data after the second evaluation."""

        def on_eval(self, step, values):
            if step == 2:
                held_out[0]["x"][:] = np.nan

    held_out = [{"x": X.copy(), "scale": np.ones((8, 1), np.float32)}]
    result = fit(
        tmp_path,
        batches(),
        steps=5,
        keep_last=1,
        eval_data=held_out,
        eval_every=1,
        callbacks=[Poisoned()],
    )
    assert [np.isnan(values["loss"]) for values in result.eval.values()] == [False] * 2 + [True] * 3
    assert saved(tmp_path) == [2, 5]
    assert CheckpointReader(tmp_path / "checkpoints").best() == 2
    lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    warned = [line["step"] for line in lines if "never the best" in line["message"]]
    assert warned == [3, 4, 5]
