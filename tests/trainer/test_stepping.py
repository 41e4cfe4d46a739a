"""Training by hand, one batch at a time, equals `fit`; what was kept from a model stays alive."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.errors import NotFinite

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.normal(size=(16, 8)).astype(np.float32),
        "y": RNG.normal(size=(16, 4)).astype(np.float32),
    }
    for _ in range(4)
]


def squares(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def trainer(**settings):
    return mw.Trainer(
        model=lambda rngs: nnx.Linear(8, 4, rngs=rngs),
        loss=squares,
        optimizer=optax.adam(0.1),
        mesh="fsdp=4,tensor=2",
        **settings,
    )


def test_steps_equal_a_fit_and_mix_with_it(tmp_path):
    whole = trainer().fit(BATCHES, steps=4)
    own = trainer()
    losses = [own.step(batch)["loss"] for batch in BATCHES[:2]]
    assert own.fit(BATCHES, steps=3).steps == 3
    kept = own.result
    snapshot = own.snapshot()
    own.step(BATCHES[3])
    np.testing.assert_array_equal(own.result.params["kernel"], whole.params["kernel"])
    assert losses[0] == whole.losses[1]
    assert own.result.steps == 4
    np.testing.assert_array_equal(kept.params["kernel"], snapshot.kernel[...])
    own.result.save(tmp_path)
    again = trainer()
    again.fit(BATCHES, steps=4, run_dir=tmp_path / "run", resume=str(tmp_path), progress=False)
    np.testing.assert_array_equal(again.result.params["kernel"], whole.params["kernel"])


def test_a_step_that_is_not_finite_changes_nothing():
    bad = {**BATCHES[0], "x": np.full((16, 8), np.nan, np.float32)}
    own = trainer()
    own.step(BATCHES[0])
    with pytest.raises(NotFinite, match="the loss is nan"):
        own.step(bad)
    own.step(BATCHES[1])
    expected = trainer().fit(BATCHES, steps=2).params["kernel"]
    np.testing.assert_array_equal(own.result.params["kernel"], expected)
    skipping = trainer(on_nonfinite="skip")
    assert skipping.step(bad)["skipped"] == 1


def test_a_snapshot_in_a_callback_stays_alive():
    class Keep(mw.Callback):
        def on_start(self, step):
            self.kept = self.context.snapshot()

    keep = Keep()
    result = trainer().fit(BATCHES, steps=2, callbacks=[keep])
    assert not np.array_equal(keep.kept.kernel[...], result.model.kernel[...])
    assert keep.kept.kernel[...].sharding == result.model.kernel[...].sharding
    assert jax.tree.leaves(nnx.state(keep.kept))[0].is_deleted() is False


def test_a_step_warns_as_fit_does():
    own = mw.Trainer(
        model=lambda rngs: nnx.Linear(8, 4, rngs=rngs),
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum(),
        optimizer=optax.adam(0.1),
        mesh="data=8",
        gradient_accumulation_steps=2,
    )
    with pytest.warns(UserWarning, match="microbatch"):
        own.step(BATCHES[0])
