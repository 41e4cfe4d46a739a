"""Schedules: complete, free of deadlock, as good as the closed forms say."""

from fractions import Fraction

import pytest

from meshwright.errors import UserError
from meshwright.pipeline.schedule.operations import Kind, Op, Shape, Times
from meshwright.pipeline.schedule.schedules import (
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    ZeroBubbleH1,
    get_schedule,
)
from meshwright.pipeline.schedule.timeline import in_flight, simulate

pytestmark = pytest.mark.quick

ALL = [GPipe(), OneForwardOneBackward(), Interleaved(2), Interleaved(3), ZeroBubbleH1()]
SIZES = [(1, 1), (4, 1), (2, 2), (8, 2), (6, 3), (4, 4), (8, 4), (16, 4), (16, 8)]


def check_operations(lists, shape):
    """Every stage runs each microbatch of each chunk once, and no stage waits forever."""
    assert len(lists) == shape.num_stages
    wanted = {(m, c) for m in range(shape.num_microbatches) for c in range(shape.num_chunks)}
    for ops in lists:
        seen = {}
        for op in ops:
            seen[op.microbatch, op.chunk] = seen.get((op.microbatch, op.chunk), "") + op.kind.value
        assert seen.keys() == wanted
        assert set(seen.values()) <= {"FB", "FIW"}
    simulate(lists, shape)


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: f"{s.name}{s.num_chunks}")
def test_both_forms_do_every_operation_once_and_never_deadlock(schedule):
    for microbatches, stages in SIZES:
        shape = schedule.shape(microbatches, stages)
        check_operations(schedule.operations(microbatches, stages), shape)
        check_operations(schedule.table(microbatches, stages).operations(), shape)


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: f"{s.name}{s.num_chunks}")
def test_the_simulated_bubbles_of_both_forms_are_the_formula(schedule):
    for microbatches, stages in SIZES:
        formula = schedule.bubble(microbatches, stages)
        shape = schedule.shape(microbatches, stages)
        assert simulate(schedule.operations(microbatches, stages), shape).bubble == formula
        assert schedule.table(microbatches, stages).timeline().bubble == formula
        assert schedule.efficiency(microbatches, stages) == 1 - formula


def test_efficiency_is_the_share_of_ticks_with_work():
    for microbatches, stages, percent in [(2, 4, 40), (8, 4, 73)]:
        efficiency = GPipe().efficiency(microbatches, stages)
        assert efficiency == Fraction(microbatches, microbatches + stages - 1)
        assert round(efficiency * 100) == percent


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_ninety_percent_needs_nine_microbatches_for_each_stage_but_one(stages):
    for schedule in (GPipe(), OneForwardOneBackward()):
        assert schedule.microbatches_for(0.9, stages) == 9 * (stages - 1)
        assert schedule.efficiency(9 * (stages - 1), stages) == Fraction(9, 10)


def test_zero_bubble_waits_less_than_half_as_long():
    ratio = ZeroBubbleH1().table(8, 4).timeline().bubble / (
        OneForwardOneBackward().table(8, 4).timeline().bubble
    )
    assert ratio <= Fraction(45, 100)


@pytest.mark.parametrize("microbatches", [16, 64])
def test_activations_kept_are_bounded_by_stages_except_with_gpipe(microbatches):
    stages = 4
    kept = {s: max(in_flight(s.operations(microbatches, stages))) for s in ALL}
    assert kept[GPipe()] == microbatches
    assert kept[OneForwardOneBackward()] == kept[ZeroBubbleH1()] == stages
    lockstep = {s: max(in_flight(s.table(microbatches, stages).operations())) for s in ALL}
    assert lockstep[OneForwardOneBackward()] == 2 * stages - 1
    assert lockstep[ZeroBubbleH1()] == stages
    assert lockstep[Interleaved(2)] == 3 * stages - 1


def test_1f1b_of_four_stages_is_the_textbook_order():
    ops = OneForwardOneBackward().operations(5, 4)
    assert " ".join(map(str, ops[0])) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert " ".join(map(str, ops[3])) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_gpipe_passes_forward_in_stages_plus_microbatches_minus_one_ticks():
    table = GPipe().table(8, 4)
    forward = [n for n, _, op in table.placed() if op.kind is Kind.FORWARD]
    assert max(forward) + 1 == 8 + 4 - 1


def test_a_slow_stage_is_what_everyone_waits_for():
    times = Times(scale=(1, 1, 3, 1))
    shape = Shape(8, 4)
    ideal = simulate(OneForwardOneBackward().operations(8, 4), shape, times)
    # The slow stage works without a pause: filling, 8 microbatches of 9, emptying.
    assert ideal.makespan == 2 + 8 * 9 + 2 * 2
    assert ideal.bubble == 1 - Fraction(8 * 3 * (1 + 1 + 3 + 1), 4 * ideal.makespan)


def test_interleaving_needs_whole_groups_of_microbatches():
    with pytest.raises(UserError, match=r"num_microbatches=8 or 12"):
        Interleaved(2).table(10, 4)


def test_unknown_schedules_are_named_with_the_nearest_one():
    with pytest.raises(UserError, match="did you mean `zb_h1`"):
        get_schedule("zbh1")


def test_circular_lists_are_refused():
    late = [[Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0), Op(Kind.FORWARD, 1), Op(Kind.BACKWARD, 1)]]
    early = [[Op(Kind.FORWARD, 1), Op(Kind.BACKWARD, 1), Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0)]]
    with pytest.raises(UserError, match="wait for each other forever"):
        simulate(late + early, Shape(2, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: get_schedule(3),
        lambda: get_schedule("interleaved", 0),
        lambda: get_schedule("gpipe").efficiency("8", 4),
        lambda: get_schedule("gpipe").table(8.5, 2),
        lambda: get_schedule("zb_h1").operations(8, 0),
        lambda: get_schedule("1f1b").microbatches_for("x", 4),
        lambda: get_schedule("1f1b").microbatches_for(0.9, 0),
    ],
)
def test_what_is_no_size_is_refused(call):
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.fix
