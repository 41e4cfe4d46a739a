"""Warnings name the numbers and the better setting."""

from meshwright.pipeline.advice import imbalance, pipeline_warnings
from meshwright.pipeline.schedules import get_schedule


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
    assert "stage 3 has 60% more work" in text
    assert imbalance([1, 1, 1, 1]) == 0
    assert pipeline_warnings(get_schedule("1f1b"), 16, 4, [10, 10, 10, 11]) == []
