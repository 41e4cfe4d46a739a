"""Batches of pipelines: what is refused comes with numbers that work when they are written."""

import itertools
import re

import pytest

from meshwright.config.microbatches import nearest_microbatches, solve_pipeline_batch
from meshwright.config.schema import PipelineConfig
from meshwright.errors import UserError

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("command_line")]

KEYS = {
    "num_microbatches": r"pipeline\.num_microbatches=(\d+)(?: or (\d+))?",
    "gradient_accumulation_steps": r"training\.gradient_accumulation_steps=(\d+)(?: or (\d+))?",
    "global_batch_size": r"global batch of (\d+)(?: or (\d+))? samples",
}


def solve(stages=2, data=1, schedule="interleaved", num_microbatches=None, **training):
    pipeline = PipelineConfig(schedule=schedule, num_microbatches=num_microbatches)
    batch = solve_pipeline_batch(pipeline, {"pipe": stages, "data": data}, **training)
    steps = batch.gradient_accumulation_steps
    assert schedule != "interleaved" or (num_microbatches or steps) % stages == 0
    return steps


def advised(asked, fix):
    """Yield what is asked for if each of the alternatives an error names is written."""
    if "leave training.gradient_accumulation_steps out" in fix:
        kept = {**asked, "gradient_accumulation_steps": None}
    else:
        kept = asked
    for alternative in fix.split(", or "):
        if "schedule=1f1b" in alternative:
            yield {**asked, "schedule": "1f1b"}
            continue
        found = {name: re.search(pattern, alternative) for name, pattern in KEYS.items()}
        values = {name: filter(None, match.groups()) for name, match in found.items() if match}
        assert values, alternative
        for chosen in itertools.product(*values.values()):
            yield {**kept, **dict(zip(values, map(int, chosen), strict=True))}


def test_advice_works_when_it_is_followed():
    followed = 0
    for stages, data, count, samples, steps in itertools.product(
        (2, 4), (1, 3), (None, 1, 3, 5, 6), (None, 1, 8, 12, 34), (None, 2, 6)
    ):
        asked = {
            "stages": stages,
            "data": data,
            "num_microbatches": count,
            "global_batch_size": samples,
            "gradient_accumulation_steps": steps,
        }
        try:
            solve(**asked)
        except UserError as error:
            if "one per stage" not in error.what:
                continue
            for instead in advised(asked, error.fix):
                solve(**instead)
                followed += 1
    assert followed > 200


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        ({"data": 4}, "write pipeline.num_microbatches=2 or 4, or pipeline.schedule=1f1b"),
        ({"global_batch_size": 16}, "write pipeline.num_microbatches=2 or 4"),
        (
            {"global_batch_size": 9},
            "write pipeline.num_microbatches=2 with a global batch of 8 or 10 samples, or "
            "pipeline.schedule=1f1b",
        ),
        (
            {"global_batch_size": 36, "micro_batch_size": 3},
            "write pipeline.num_microbatches=2 or 4, or pipeline.schedule=1f1b",
        ),
        (
            {"gradient_accumulation_steps": 5},
            "leave training.gradient_accumulation_steps out and write "
            "pipeline.num_microbatches=2 or 4",
        ),
    ],
)
def test_three_microbatches_do_not_go_round_two_stages(asked, fix):
    with pytest.raises(
        UserError, match="3 microbatches cannot be divided into groups of 2"
    ) as caught:
        solve(num_microbatches=3, **asked)
    assert "pipeline.num_microbatches=3 is not a multiple of 2" in caught.value.why
    assert caught.value.fix == fix


def test_a_batch_without_whole_groups_is_refused_with_its_arithmetic():
    with pytest.raises(UserError, match="9 samples cannot be divided into groups of 4") as caught:
        solve(stages=4, data=2, global_batch_size=9)
    assert "2 replicas (data × fsdp) × 4 stages = 8, and 9 is not a multiple" in caught.value.why
    with pytest.raises(UserError, match=r"micro_batch_size 3 × 1 replica \(data × fsdp\) × 2"):
        solve(global_batch_size=9, micro_batch_size=3)


def test_the_samples_of_a_replica_are_divided_into_whole_groups_where_they_can():
    assert solve(stages=4, global_batch_size=20) == 4
    assert solve(stages=4, global_batch_size=20, schedule="1f1b") == 10


def test_one_replica_is_one_replica():
    with pytest.raises(UserError, match=r"1 replica \(data × fsdp\) × pipeline.num_micro"):
        solve(schedule="1f1b", num_microbatches=5, global_batch_size=16)


@pytest.mark.parametrize(
    ("total", "near", "multiple_of", "expected"),
    [
        (16, 5, 1, [4, 8]),
        (12, 5, 1, [4, 6]),
        (16, 3, 4, [4, 8]),
        (4, 9, 1, [2, 4]),
        (5, 3, 2, []),
        (0, 3, 1, []),
    ],
)
def test_numbers_of_microbatches_are_named_on_both_sides(total, near, multiple_of, expected):
    assert nearest_microbatches(total, near, multiple_of) == expected
