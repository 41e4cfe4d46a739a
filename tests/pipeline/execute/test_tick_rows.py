"""What stages do of what a tick may do."""

import re

import jax
import jax.numpy as jnp
import pytest

from meshwright.pipeline.execute.exchanges import ExchangeOrder, Transfer
from meshwright.pipeline.execute.tick_rows import TickOp, count_operations
from meshwright.pipeline.schedule.schedules import get_schedule

M, S = 8, 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_every_stage_does_what_its_microbatches_need(name, rounds):
    schedule = get_schedule(name)
    done = count_operations(schedule, M, S, rounds)
    each = [schedule.num_chunks * M * rounds] * S
    assert done.ticks == rounds * len(schedule.table(M, S).ticks)
    assert done.counts["forward"] == done.counts["backward"] == each
    assert done.counts["weight"] == (each if schedule.splits_backward else [0] * S)
    assert done.counts["embedding"] == [M * rounds, 0, 0, 0]
    assert done.counts["head"] == [0, 0, 0, M * rounds]
    for way, end in (("send", S - 1), ("send_back", 0)):
        sent = done.counts[way]
        closed = schedule.num_chunks > 1
        assert all(n >= each[0] for stage, n in enumerate(sent) if stage != end or closed)
        assert sent[end] == (sent[1] if closed else 0)


def test_an_instruction_counts_as_often_as_its_operation():
    done = count_operations(get_schedule("1f1b"), M, S)
    inside = "while/body/tick-forward/cond/tick-embedding/~emb/gather"
    assert [done.times(inside, 2 * done.ticks, stage) for stage in range(S)] == [2 * M, 0, 0, 0]
    assert done.times("jit(_update)/psum", 3, 1) == 3


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_sent_counts_once_however_many_branches_send(platform):
    done = count_operations(get_schedule("1f1b"), M, S)
    both = jnp.ones((), bool)

    def tick(x):
        ahead = Transfer(TickOp.SEND, x, [(0, 1), (1, 2), (2, 3)], both)
        back = Transfer(TickOp.SEND_BACK, x, [(1, 0), (2, 1), (3, 2)], both)
        return ExchangeOrder(platform).exchange(ahead, back)

    mesh, spec = jax.sharding.Mesh(jax.devices()[:S], "pipe"), jax.P("pipe")
    mapped = jax.shard_map(tick, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(mapped).lower(jnp.zeros(S)).compile().as_text()
    names = re.findall(r'= \S+ collective-permute\(.*op_name="([^"]*)"', text)
    assert len(names) == (2 if platform == "cpu" else 4)
    for stage in range(S):
        expected = done.counts["send"][stage] + done.counts["send_back"][stage]
        assert sum(done.times(name, done.ticks, stage) for name in names) == expected
