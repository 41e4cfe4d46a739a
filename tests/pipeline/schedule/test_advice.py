"""Warnings name the numbers and the better setting."""

from fractions import Fraction

import pytest

from meshwright.pipeline.schedule.advice import bubble_with, imbalance, pipeline_warnings
from meshwright.pipeline.schedule.schedules import get_schedule

pytestmark = pytest.mark.quick


def test_enough_equal_work_gives_no_warning():
    assert pipeline_warnings(get_schedule("1f1b"), 16, 4, [5, 5, 5, 5]) == []


def test_few_microbatches_are_named_with_what_more_would_give():
    (text,) = pipeline_warnings(get_schedule("1f1b"), 8, 4)
    assert "8 microbatches" in text
    assert "73%" in text
    assert "num_microbatches=16 gives 84%" in text


def test_a_large_bubble_is_named_with_a_way_out():
    texts = pipeline_warnings(get_schedule("gpipe"), 2, 4)
    assert any("wait 60%" in t and "num_microbatches=27" in t and "zb_h1" in t for t in texts)


def test_an_uneven_stage_is_named():
    (text,) = pipeline_warnings(get_schedule("1f1b"), 16, 4, [1, 1, 1, 2])
    assert (
        "stage 3 has 60% more work than the mean (shares of the work: 20%, 20%, 20%, 40%)" in text
    )
    # With a mean of 1: 3 ticks of 0.8, 16 of 3 · 1.6, 3 of 2 · 0.8; 3 · 16 of these 84 are work.
    assert "so stages wait 43% of the time instead of 16%" in text
    assert imbalance([1, 1, 1, 1]) == 0
    assert pipeline_warnings(get_schedule("1f1b"), 16, 4, [10, 10, 10, 11]) == []


def test_waiting_counts_the_work_of_stages():
    costs = [10, 10, 10, 11]
    assert bubble_with(get_schedule("1f1b"), 16, 4, [3, 3, 3, 3]) == Fraction(3, 19)
    assert bubble_with(get_schedule("1f1b"), 16, 4, []) == Fraction(3, 19)
    assert Fraction(3, 19) < bubble_with(get_schedule("1f1b"), 16, 4, costs) < Fraction(1, 4)
    # 27% if stages were equal; with a stage 19% above the mean, 24 of 36.9 are work.
    (few, text) = pipeline_warnings(get_schedule("1f1b"), 8, 4, [9, 9, 9, 11.4])
    assert "8 microbatches are few" in few
    assert "stages wait 35% of the time" in text
    assert "num_microbatches=27 gives an efficiency of 90% if they have equal work" in text


def test_batch_sizes_that_more_microbatches_divide_are_named():
    def told(samples):
        return pipeline_warnings(get_schedule("1f1b"), 1, 4, samples=samples, replicas=2)[0]

    assert told(34).startswith("1 microbatch is few for 4 stages: efficiency 25%")
    assert "num_microbatches=16 with a global batch of 32 or 64 samples gives 84%" in told(34)
    assert "num_microbatches=16 with a global batch of 32 samples gives" in told(6)
    assert "num_microbatches=16 gives 84%" in told(64)
