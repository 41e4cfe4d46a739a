"""Evaluation by stages is the loss of the model as its author wrote it."""

import jax
import numpy as np
import pytest
from pipeline.execute.test_pipelined_loss import CUBE, put
from pipeline.models import VOCABULARY, WIDTH, Tokens, tokens_batch, tokens_loss
from quick import quick_module

from meshwright.pipeline.execute.forward_only import forward_table
from meshwright.pipeline.schedule.operations import Kind
from meshwright.step.eval_step import compile_evaluation

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")
SIZES = [(1, 4, 1), (8, 4, 1), (3, 2, 2), (5, 4, 3), (8, 2, 4)]


def build():
    return Tokens(tied=True, dropout=0.5)


@pytest.mark.parametrize(("count", "stages", "chunks"), SIZES)
def test_each_piece_sees_each_microbatch_once_and_right_after_the_piece_before(
    count, stages, chunks
):
    table = forward_table(count, stages, chunks)
    at = {
        (op.microbatch, table.shape.virtual(op, stage)): tick
        for tick, stage, op in table.placed()
        if op.kind is Kind.FORWARD
    }
    assert len(at) == sum(1 for _ in table.placed()) == count * stages * chunks
    for (microbatch, piece), tick in at.items():
        assert tick == at[microbatch, 0] + piece


@pytest.mark.parametrize(
    ("schedule", "mesh", "together"),
    [
        pytest.param("1f1b", CUBE, 4, marks=pytest.mark.full),
        ("interleaved", {"pipe": 2}, 3),
    ],
)
def test_evaluation_by_stages_is_the_loss_of_the_model(schedule, mesh, together):
    batch = tokens_batch(12 if together == 3 else 16, seed=5)
    training = tokens_batch(16)
    assembled = put(build, tokens_loss, training, mesh, schedule, wide=False)
    model = build()
    state = assembled.adopt(model)
    run = compile_evaluation(
        assembled, tokens_loss, assembled.put_batch(batch), together, pytest.fail
    )
    found = run(assembled.step.leaf_values(state), assembled.put_batch(batch))
    model.eval()
    loss, metrics = tokens_loss(model, batch)
    np.testing.assert_allclose(found["loss"].mean, loss.mean, rtol=1e-6)
    np.testing.assert_allclose(found["loss"].weight, loss.weight)
    np.testing.assert_allclose(found["accuracy"].total, metrics["accuracy"].total)


class Shortened(Tokens):
    """Runs its first block alone when evaluated."""

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in list(self.blocks)[: 1 if self.dropout.deterministic else 4]:
            x = block(x)
        return self.head(x)


def test_a_model_that_cannot_be_divided_in_evaluation_mode_is_evaluated_whole_and_says_so():
    batch, warnings = tokens_batch(16), []
    assembled = put(Shortened, tokens_loss, batch, {"pipe": 2}, "1f1b", wide=False)
    state, placed = assembled.adopt(Shortened()), assembled.put_batch(batch)
    run = compile_evaluation(assembled, tokens_loss, placed, 4, warnings.append)
    found = run(assembled.step.leaf_values(state), placed)
    model = Shortened()
    model.eval()
    np.testing.assert_allclose(found["loss"].mean, tokens_loss(model, batch)[0].mean, rtol=1e-6)
    (warning,) = warnings
    assert "does not run in pipeline stages" in warning
    assert "no repeated blocks" in warning


def test_no_stage_reads_blocks_of_another():
    batch = tokens_batch(16)
    assembled = put(build, tokens_loss, batch, {"pipe": 4}, "1f1b", wide=False)
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=assembled.step.shardings.batch)
        for a in jax.tree.leaves(batch)
    ]
    text = compile_evaluation(assembled, tokens_loss, structs, 4, pytest.fail).as_text()
    assert "collective-permute" in text
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    # The table that is embedding and head, once.
    assert len(gathered) == 1
    assert f"f32[{VOCABULARY},{WIDTH}]" in gathered[0]
