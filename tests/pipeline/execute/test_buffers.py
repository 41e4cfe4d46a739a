"""Slots: played through, every operation finds what was left for it."""

import pytest

from meshwright.pipeline.execute.tick_rows import ABSENT, allocate_slots, count_slots
from meshwright.pipeline.schedule.schedules import get_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("size", [(2, 2), (8, 2), (4, 4), (8, 4), (16, 4)])
def test_playing_the_table_through_finds_every_value_in_its_slot(name, size):
    table = get_schedule(name).table(*size)
    slots, counts, shape = allocate_slots(table), count_slots(table), table.shape
    stages, last = range(shape.num_stages), shape.num_virtual - 1
    inbox, gradients, kept, cuts = ([{} for _ in stages] for _ in range(4))
    sent, sent_back = {}, {}
    for tick in range(len(table.ticks)):
        for s in stages:
            if slots.activation_in[tick][s] != ABSENT:
                inbox[s][slots.activation_in[tick][s]] = sent[(s - 1) % shape.num_stages]
            if slots.gradient_in[tick][s] != ABSENT:
                gradients[s][slots.gradient_in[tick][s]] = sent_back[(s + 1) % shape.num_stages]
        sent, sent_back = {}, {}
        for s in stages:
            f, b, w = slots.forward, slots.backward, slots.weight
            m, c = f.microbatch[tick][s], f.chunk[tick][s]
            at = c * shape.num_stages + s
            if m != ABSENT:
                assert f.reads[tick][s] == ABSENT if at == 0 else True
                assert at == 0 or inbox[s][f.reads[tick][s]] == (m, at - 1)
                kept[s][f.saved[tick][s]] = (m, c)
                sent[s] = (m, at)
                if at == last:
                    gradients[s][slots.gradient_own[tick][s]] = (m, at + 1)
            m, c = b.microbatch[tick][s], b.chunk[tick][s]
            at = c * shape.num_stages + s
            if m != ABSENT:
                assert gradients[s][b.reads[tick][s]] == (m, at + 1)
                assert kept[s][b.saved[tick][s]] == (m, c)
                sent_back[s] = (m, at)
                if b.cut[tick][s] != ABSENT:
                    cuts[s][b.cut[tick][s]] = (m, c)
            m, c = w.microbatch[tick][s], w.chunk[tick][s]
            if m != ABSENT:
                assert kept[s][w.saved[tick][s]] == (m, c)
                assert cuts[s][w.cut[tick][s]] == (m, c)
    for boxes, count in (
        (inbox, counts.num_activations),
        (gradients, counts.num_gradients),
        (kept, counts.num_saved),
        (cuts, counts.num_cuts),
    ):
        assert max(map(len, boxes)) == count


def test_messages_are_used_at_once_so_one_slot_is_enough():
    for name in ("1f1b", "interleaved", "zb_h1"):
        slots = count_slots(get_schedule(name).table(16, 4))
        assert (slots.num_activations, slots.num_gradients) == (1, 1)


def test_kept_slots_do_not_grow_with_microbatches():
    for name, kept in {"1f1b": 7, "interleaved": 11, "zb_h1": 4}.items():
        for microbatches in (16, 64):
            slots = count_slots(get_schedule(name).table(microbatches, 4))
            assert slots.num_saved == kept


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("size", [(2, 2), (8, 2), (8, 4), (12, 4)])
def test_ticks_with_arrivals_are_counted(name, size):
    table = get_schedule(name).table(*size)
    slots, counts = allocate_slots(table), count_slots(table)
    for ticks, arrivals in (
        (counts.activation_ticks, slots.activation_in),
        (counts.gradient_ticks, slots.gradient_in),
    ):
        assert ticks == sum(any(slot != ABSENT for slot in row) for row in arrivals)
