"""Communication is told from computing by the program, or by names where there is none."""

import pytest

from meshwright.profile.trace_times import CollectiveNames, TracedCollective

pytestmark = pytest.mark.quick

PROGRAM = """
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %all-gather-start.1 = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%p), \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true, channel_id=1, \
metadata={op_name="jit(step)/jvp(~blocks.0.mlp)/gather"}
  %all-gather-done.7 = f32[32,16]{1,0} all-gather-done(%all-gather-start.1)
  %slice.1 = f32[8,16]{1,0} slice(%all-gather-done.7), slice={[0:8], [0:16]}
  ROOT %all-reduce.2 = f32[8,16]{1,0} all-reduce(%slice.1), \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, channel_id=2, \
to_apply=%add, metadata={op_name="jit(step)/jvp(~blocks.1.attention)/dot_general"}
}
"""


def test_a_program_gives_axes_modules_and_bytes():
    collectives = CollectiveNames(PROGRAM, {"fsdp": 4, "tensor": 2})
    gather = TracedCollective("all-gather", ("fsdp",), "blocks.0.mlp", 3 / 4 * 32 * 16 * 4)
    assert collectives.find("all-gather-start.1", "ncclDevKernel_AllGather_RING_LL") == gather
    assert collectives.find("all-gather-done.7", "wait") == gather
    reduced = collectives.find("all-reduce.2", "all-reduce.2")
    assert reduced == TracedCollective("all-reduce", ("tensor",), "blocks.1.attention", 8 * 16 * 4)
    assert collectives.find("all-reduce_fusion.2", "all-reduce_fusion.2") is None


@pytest.mark.parametrize(
    ("name", "kernel", "kind"),
    [
        ("all-reduce.96", "all-reduce.96", "all-reduce"),
        ("wide.all-gather.3", "wide.all-gather.3", "all-gather"),
        ("reduce-scatter.1", "reduce-scatter.1", "reduce-scatter"),
        ("collective-permute-start.1", "memcpy", "collective-permute"),
        ("graph", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "all-reduce"),
        ("graph", "ncclDevKernel_SendRecv(...)", "collective-permute"),
        ("graph", "ncclKernel_Mystery", "collective"),
    ],
)
def test_names_alone_give_the_kind(name, kernel, kind):
    assert CollectiveNames(None, {}).find(name, kernel) == TracedCollective(kind)


@pytest.mark.parametrize("name", ["fusion.1", "reduce.4", "all-gather_bitcast_fusion.2", "dot.1"])
def test_computing_is_no_communication(name):
    assert CollectiveNames(None, {}).find(name, name) is None
