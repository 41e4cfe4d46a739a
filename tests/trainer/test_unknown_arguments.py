"""Arguments that `Trainer` does not take are refused with where they belong."""

import inspect

import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def trainer(**more):
    return mw.Trainer(
        model=lambda rngs: nnx.Linear(2, 2, rngs=rngs),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=optax.sgd(0.1),
        **more,
    )


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("micro_batch_size", "the samples of a step are `trainer.fit(…, batch_size=…)`"),
        ("global_batch_size", "the samples of a step are `trainer.fit(…, batch_size=…)`"),
        ("batch_size", "write it when you train: `trainer.fit(…, batch_size=…)`"),
        ("steps", "write it when you train: `trainer.fit(…, steps=…)`"),
        ("max_steps", "write it when you train: `trainer.fit(…, steps=…)`"),
        ("lr", "it is the optimizer's: optimizer=optax.adamw(…)"),
        ("grad_clip", "did you mean `clip_norm`?"),
        ("remat", "write sharding=mw.ShardingConfig(remat=…)"),
        ("num_microbatches", "write pipeline=mw.PipelineConfig(num_microbatches=…)"),
        ("precison", "did you mean `precision`?"),
        ("zzz", "its arguments: model, loss, optimizer, "),
    ],
)
def test_an_unknown_argument_says_where_it_belongs(name, place):
    with pytest.raises(UserError, match=f"Trainer has no argument {name}") as caught:
        trainer(**{name: 1})
    assert caught.value.fix.startswith(place)
    assert isinstance(caught.value, TypeError)


def test_the_arguments_can_still_be_listed():
    assert list(inspect.signature(mw.Trainer).parameters)[:3] == ["model", "loss", "optimizer"]
    assert trainer(seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ema_decay", "write it when you make the trainer: `mw.Trainer(…, ema_decay=…)`"),
        ("grad_clip", "write it when you make the trainer: `mw.Trainer(…, clip_norm=…)`"),
        ("keep_last", "write checkpoint=mw.CheckpointConfig(keep_last=…)"),
        ("remat", "write `mw.Trainer(…, sharding=mw.ShardingConfig(remat=…))`"),
        ("max_steps", "did you mean `steps`?"),
        ("zzz", "its arguments: data, steps, "),
    ],
)
def test_an_argument_that_fit_does_not_take_says_where_it_belongs(name, place):
    with pytest.raises(UserError, match=f"fit has no argument {name}") as caught:
        trainer().fit(**{name: 1})
    assert caught.value.fix.startswith(place)


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: mw.EarlyStopping(metric="loss"), "write mw.EarlyStopping(patience=…, metric=…)"),
        (lambda: mw.Trainer(seed=1), "write Trainer(model=…, optimizer=…, seed=…)"),
        (lambda: mw.verify(trainer()), "write trainer.verify(data=…)"),
        (lambda: mw.verify(nnx.Linear), "write mw.verify(model=…, loss=…, plan=…, batches=…)"),
    ],
)
def test_what_a_call_lacks_is_one_message(call, fix):
    with pytest.raises(UserError, match="cannot be called like this") as caught:
        call()
    assert caught.value.fix == fix


def test_a_trainer_is_verified_by_either_name(monkeypatch):
    monkeypatch.setattr(mw.Trainer, "verify", lambda self, data, steps=5: (self, data, steps))
    own = trainer()
    assert mw.verify(own, "batches", steps=2) == (own, "batches", 2)
