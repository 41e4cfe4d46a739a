"""What inspect says about a pipeline."""

from dataclasses import asdict

import pytest
from flax import nnx
from pipeline.execute.test_pipelined_loss import put
from pipeline.models import VOCABULARY, WIDTH, Tokens, tokens_batch, tokens_loss

pytestmark = pytest.mark.quick

BLOCK = WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * WIDTH * WIDTH
ROWS = 4 * 4
"""Tokens of a microbatch: 4 samples of 4."""


@pytest.fixture(scope="module")
def report():
    assembled = put(lambda: Tokens(8), tokens_loss, tokens_batch(), {"pipe": 2}, "interleaved")
    return assembled.pipeline_report, assembled


def test_stages_are_listed_with_what_they_hold_and_do(report):
    first, second = report[0].stages
    assert first.blocks == (0, 1, 4, 5)
    assert second.blocks == (2, 3, 6, 7)
    assert (first.also, second.also) == (("embedding",), ("head",))
    assert first.parameters == 4 * BLOCK + VOCABULARY * WIDTH
    assert second.parameters == 4 * BLOCK + VOCABULARY * WIDTH + VOCABULARY
    products = 2 * ROWS * 2 * 2 * WIDTH * WIDTH
    assert first.flops == 4 * products
    assert second.flops == 4 * products + 2 * ROWS * WIDTH * VOCABULARY


def test_waiting_is_simulated_from_the_executed_ticks(report):
    found = asdict(report[0])
    assert found["schedule"] == "interleaved"
    assert found["bubble"] == found["bubble_formula"] == pytest.approx(1 / 9)
    assert found["efficiency"] == pytest.approx(8 / 9)
    assert found["bubble_with_flops"] > found["bubble"]
    assert found["ticks"] == 8 + 3 + 1
    said = report[0].summary()
    assert said.startswith("pipeline: interleaved with 4 microbatches on 2 stages × 2 chunks")
    assert "wait 11.1% of the time" in said
    assert f"{found['bubble_with_flops']:.1%} if each is as slow as its FLOPs say" in said


def test_warnings_become_remarks_of_the_step(report):
    assert report[0].warnings
    assert set(report[0].warnings) <= set(report[1].remarks)
    assert "4 microbatches are few for 2 stages" in report[0].warnings[0]


def test_blocks_that_do_not_divide_are_reported_with_what_they_cost():
    assembled = put(lambda: Tokens(6), tokens_loss, tokens_batch(), {"pipe": 4}, "1f1b")
    found = assembled.pipeline_report
    assert [stage.blocks for stage in found.stages] == [(0,), (1, 2), (3, 4), (5,)]
    assert [stage.parameters // BLOCK for stage in found.stages] == [1, 2, 2, 1]
    assert found.stages[0].flops == found.stages[1].flops
    (warning,) = [text for text in found.warnings if "cannot be divided evenly" in text]
    assert "which have 1, 2, 2, 1" in warning
    assert "25% of the time of blocks is lost; " in warning
    assert 'lost; mesh="pipe=2", or 4 or 8 such blocks would' in warning


class Conditioned(Tokens):
    """Every block reads what is computed from the samples before the first."""

    def __init__(self):
        super().__init__(4)
        self.condition = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        x = self.embed(tokens)
        condition = self.condition(x)
        for block in self.blocks:
            x = block(x + condition)
        return self.head(x)


def test_what_all_blocks_read_counts_on_every_stage():
    assembled = put(Conditioned, tokens_loss, tokens_batch(), {"pipe": 2}, "1f1b")
    found = assembled.pipeline_report
    assert [stage.also[-1] for stage in found.stages] == ["what all blocks read"] * 2
    again = 2 * ROWS * WIDTH * WIDTH
    assert found.stages[0].flops == 2 * 2 * ROWS * 2 * 2 * WIDTH * WIDTH + again
    assert any("each stage computes them itself" in text for text in found.warnings)


class Mixed(Tokens):
    """A first block with a bias that the others do not have."""

    def __init__(self):
        super().__init__(5)
        self.blocks[0].down = nnx.Linear(2 * WIDTH, WIDTH, rngs=nnx.Rngs(1))


def test_a_heavy_head_is_named_as_such():
    # Random keys of blocks that drop nothing are read by no block.
    assembled = put(lambda: Tokens(4), tokens_loss, tokens_batch(), {"pipe": 4}, "1f1b")
    (warning,) = [text for text in assembled.pipeline_report.warnings if "than the mean" in text]
    assert "its head weighs less with fewer stages" in warning
    assert "not like the other blocks" not in warning


def test_blocks_go_by_their_numbers_in_the_model():
    assembled = put(Mixed, tokens_loss, tokens_batch(), {"pipe": 2}, "1f1b")
    assert [stage.blocks for stage in assembled.pipeline_report.stages] == [(1, 2), (3, 4)]
    assert any("not `blocks.0`" in remark for remark in assembled.remarks)
