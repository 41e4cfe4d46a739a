"""What stages of a schedule keep and send, without its whole table."""

import pytest

from meshwright.pipeline.execute import tick_rows
from meshwright.pipeline.execute.tick_rows import TickOp, count_operations
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.planner.workload.stage_parts import count_slots


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)]
)
def test_messages_of_many_microbatches_are_those_of_the_table(schedule, chunks, stages):
    microbatches = 12 * stages
    counts = count_operations(get_schedule(schedule, chunks), microbatches, stages).counts
    sent = [counts[TickOp.SEND][n] + counts[TickOp.SEND_BACK][n] for n in range(stages)]
    assert count_slots(schedule, chunks, microbatches, stages).messages == max(sent)


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb_h1", 1)])
def test_slots_of_many_microbatches_are_those_of_the_table(schedule, chunks, stages):
    microbatches = 6 * stages
    slots = tick_rows.count_slots(get_schedule(schedule, chunks).table(microbatches, stages))
    counts = count_slots(schedule, chunks, microbatches, stages)
    assert (counts.saved, counts.cuts) == (slots.num_saved, slots.num_cuts)
    assert counts.carried == slots.num_activations + slots.num_gradients
