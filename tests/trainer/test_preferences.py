"""Training on preferences: the reference is the initial model, on any mesh and after resumes."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.tasks.dpo import DPO

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

PAIRS, LENGTH, VOCAB, BATCH, BETA, RATE = 24, 7, 8, 8, 0.5, 2.0
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DATA = {
    "chosen": RANDOM.integers(VOCAB, size=(PAIRS, LENGTH)).astype(np.int32),
    "rejected": RANDOM.integers(VOCAB, size=(PAIRS, LENGTH)).astype(np.int32),
    "chosen_mask": np.arange(LENGTH) >= RANDOM.integers(1, 4, size=(PAIRS, 1)),
    "rejected_mask": np.arange(LENGTH) >= RANDOM.integers(1, 4, size=(PAIRS, 1)),
}


class Regression(nnx.Module):
    """The logits of the next token are the row of the last."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(TABLE)

    def __call__(self, tokens):
        return self.table[...][tokens]


def trainer(**settings):
    defaults = {"model": Regression, "loss": DPO(beta=BETA), "optimizer": optax.sgd(RATE)}
    return mw.Trainer(
        **{**defaults, "mesh": "data=2,fsdp=2", "devices": jax.devices()[:4], **settings}
    )


def answers(table, side, ids):
    """Log-probabilities of answers and their gradients by the table, in float64."""
    tokens, mask = DATA[side][ids], DATA[f"{side}_mask"][ids]
    softmax = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    totals, gradients = np.zeros(len(ids)), np.zeros((len(ids), VOCAB, VOCAB))
    for row, (own, counts) in enumerate(zip(tokens, mask, strict=True)):
        for at in np.flatnonzero(counts):
            totals[row] += np.log(softmax[own[at - 1], own[at]])
            gradients[row, own[at - 1]] += np.eye(VOCAB)[own[at]] - softmax[own[at - 1]]
    return totals, gradients


def trained_by_hand(steps):
    """The table and the loss of each step, by a plain loop."""
    from meshwright.data.arrays import ArraySource
    from meshwright.data.indexed_data import SourceData

    order, table, losses = SourceData(ArraySource(**DATA), 0), TABLE.astype(np.float64), []
    for step in range(steps):
        ids = order.ids(step, BATCH)
        (c, dc), (r, dr) = (answers(table, side, ids) for side in ("chosen", "rejected"))
        (c0, _), (r0, _) = (answers(TABLE, side, ids) for side in ("chosen", "rejected"))
        margin = BETA * (c - c0 - r + r0)
        losses.append(np.log1p(np.exp(-margin)).mean())
        slope = -BETA / (1 + np.exp(margin))
        table = table - RATE * (slope[:, None, None] * (dc - dr)).mean(axis=0)
    return table, losses


def test_training_equals_a_loop_in_numpy_with_the_initial_model_as_reference():
    held_out = {name: array[:5] for name, array in DATA.items()}
    result = trainer(gradient_accumulation_steps=2).fit(
        DATA, steps=5, batch_size=BATCH, eval_data=held_out
    )
    table, losses = trained_by_hand(5)
    np.testing.assert_allclose(result.params["table"], table, rtol=1e-5, atol=1e-6)
    assert next(iter(result.losses.values())) == pytest.approx(np.log(2), rel=1e-6)
    assert list(result.losses.values())[-1] == pytest.approx(losses[-1], rel=1e-5)
    (c, _), (r, _) = (answers(table, side, np.arange(5)) for side in ("chosen", "rejected"))
    (c0, _), (r0, _) = (answers(TABLE, side, np.arange(5)) for side in ("chosen", "rejected"))
    margin = BETA * (c - c0 - r + r0)
    assert result.eval[5]["margin"] == pytest.approx(margin.mean(), rel=1e-5)
    assert result.eval[5]["accuracy"] == pytest.approx((margin > 0).mean())
    assert result.eval[5]["chosen_length"] == DATA["chosen_mask"][:5].sum() / 5


def test_a_resumed_run_keeps_its_reference(tmp_path):
    part = trainer()
    part.fit(DATA, steps=2, batch_size=BATCH, run_dir=tmp_path / "run")
    resumed = trainer().fit(DATA, steps=4, batch_size=BATCH, run_dir=tmp_path / "run")
    in_memory = part.fit(DATA, steps=4, batch_size=BATCH, run_dir=tmp_path / "other")
    np.testing.assert_array_equal(resumed.params["table"], in_memory.params["table"])
    np.testing.assert_allclose(resumed.params["table"], trained_by_hand(4)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_run_that_goes_on_elsewhere_takes_its_reference_along(tmp_path):
    trainer().fit(DATA, steps=2, batch_size=BATCH, run_dir=tmp_path / "run")
    other = {"run_dir": tmp_path / "other", "batch_size": BATCH}
    moved = trainer().fit(DATA, steps=4, resume=tmp_path / "run", **other)
    np.testing.assert_allclose(moved.params["table"], trained_by_hand(4)[0], rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "run")
    trainer().fit(DATA, steps=5, **other)
    (file,) = (tmp_path / "other" / "initial_fields").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match="reference_chosen and reference_rejected of") as error:
        trainer().fit(DATA, steps=6, **other)
    assert f"{file} cannot be read" in error.value.why


def test_data_without_numbers_need_a_reference():
    batches = [{name: array[:BATCH] for name, array in DATA.items()}] * 2
    with pytest.raises(UserError, match="no field 'reference_chosen'"):
        trainer().fit(iter(batches), steps=1)


class Two(nnx.Module):
    """Two layers, one of which may have adapters."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(TABLE)
        self.head = nnx.Linear(VOCAB, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table[...][tokens])


@pytest.mark.full
def test_adapters_switched_off_are_the_reference_that_is_computed_once():
    lora = mw.LoRA(rank=2, targets=("head.kernel",))
    fits = [
        trainer(model=Two, loss=DPO(beta=BETA, reference=kind), lora=lora).fit(
            DATA, steps=4, batch_size=BATCH
        )
        for kind in ("precomputed", "adapter_off")
    ]
    first, second = ([*fit.losses.values()] for fit in fits)
    assert first[0] == pytest.approx(np.log(2), rel=1e-6)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert first[-1] < first[0] - 0.01


@pytest.mark.full
def test_orpo_needs_no_reference_and_data_may_bring_one():
    batches = [{name: array[:BATCH] for name, array in DATA.items()}] * 2
    trainer(loss=DPO(variant="orpo")).fit(iter(batches), steps=1)
    reference = dict.fromkeys(DPO().initial_names, np.zeros(PAIRS, np.float32))
    given = trainer().fit({**DATA, **reference}, steps=1, batch_size=BATCH)
    assert given.losses[1] != pytest.approx(np.log(2), rel=1e-3)


@pytest.mark.full
def test_the_built_in_preferences_raise_the_margin_of_held_out_pairs(tmp_path):
    settings = ["model=gpt2_nano", "model.dropout=0", "task=dpo", "data=preference"]
    settings += ["task.context_length=48", "optimizer.learning_rate=3e-3", "training.steps=40"]
    settings += ["training.eval_every=10", f"hydra.run.dir={tmp_path}/run", "mesh.fsdp=4"]
    assert main(["train", *settings]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    margins = [line["margin"] for line in lines if line.get("split") == "eval"]
    assert margins[-1] > 2 * margins[0] > 0
    assert [line["accuracy"] for line in lines if line.get("split") == "eval"][-1] > 0.75
