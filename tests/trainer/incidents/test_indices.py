"""An index out of range is told as that: by the run that it stops, in a warning, by replay."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.errors import NotFinite


class Lookup(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(32, 8, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.table(ids))


class Indexed(Lookup):
    def __call__(self, ids):
        return self.head(self.table.embedding[...][ids])


class Long(Lookup):
    """With a table of positions that has fewer rows than there are."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.places = nnx.Embed(3, 16, rngs=rngs)

    def positions(self):
        return jnp.arange(4)

    def __call__(self, ids):
        return super().__call__(ids) + self.places(self.positions())


class Short(Long):
    def positions(self):
        return jnp.arange(9)[2:0:-1].repeat(2)


def lookup_loss(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def one_hot_loss(model, batch):
    return optax.softmax_cross_entropy(model(batch["x"]), jax.nn.one_hot(batch["y"], 16)).mean()


def masked_loss(model, batch):
    y = batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), y)
    return mw.Weighted(losses.sum(where=y >= 0), (y >= 0).sum())


def trainer(model=Lookup, loss=lookup_loss, **more):
    return mw.Trainer(
        model=lambda rngs: model(rngs), loss=loss, optimizer=optax.sgd(0.1), mesh="data=8", **more
    )


def batch(**changed):
    arrays = {"x": np.zeros((8, 4), np.int32), "y": np.zeros((8, 4), np.int32)}
    for name, value in changed.items():
        arrays[name][5, 2] = value
    return arrays


LABEL = "`y` has the index 99 (row 5 of the batch), and the loss looks it up among 16"


@pytest.mark.filterwarnings("ignore:`")
@pytest.mark.full
def test_a_run_that_it_stops_names_the_index_and_so_does_replay(tmp_path):
    with pytest.raises(NotFinite, match=re.escape(LABEL)):
        trainer().fit([batch(y=99)], steps=1, run_dir=tmp_path, progress=False)
    record = next((tmp_path / "incidents").iterdir())
    assert f"out of range: {LABEL}" in str(mw.replay(record, model=Lookup, loss=lookup_loss))
    with pytest.raises(NotFinite, match=r"`x` has the index 32 .* `table` looks it up among 32"):
        trainer().fit([batch(x=32)], steps=1)


@pytest.mark.full
def test_a_later_batch_is_named_too_and_so_is_one_that_is_skipped(tmp_path):
    with pytest.raises(NotFinite, match=re.escape(LABEL)):
        trainer().fit([batch(), batch(y=99)], steps=2)
    skipping = trainer(on_nonfinite="skip")
    skipping.fit([batch(), batch(y=99), batch()], steps=3, run_dir=tmp_path, progress=False)
    assert LABEL in (tmp_path / "events.jsonl").read_text()


def test_what_gives_another_row_or_none_is_warned_about():
    with pytest.warns(UserWarning, match=re.escape(LABEL)):
        trainer(loss=one_hot_loss).fit([batch(y=99)], steps=1)
    with pytest.warns(UserWarning, match=r"`x` has the index 32"):
        trainer(Indexed).fit([batch(x=32)], steps=1)


@pytest.mark.filterwarnings("error")
def test_positions_that_a_table_has_no_row_for_are_named():
    said = "`places` looks up positions 0 to 3 among 3"
    with pytest.warns(UserWarning, match=said), pytest.raises(NotFinite, match=said):
        trainer(Long).fit([batch()], steps=1)
    trainer(Short).fit([batch()], steps=1)


@pytest.mark.filterwarnings("error")
def test_labels_that_a_loss_masks_are_no_warning():
    trainer(loss=masked_loss).fit([batch(y=-100)], steps=1)
    trainer().fit([batch(y=-1)], steps=1)
