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
        ("num_microbatches", 'write pipeline={"num_microbatches": …}'),
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
