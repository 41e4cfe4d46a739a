"""What is read from traces of CPUs, GPUs and TPUs."""

import pytest
from trace_planes import event, line, mark, plane

from meshwright.errors import EnvironmentProblem
from meshwright.profile.events import read_planes, read_trace

pytestmark = pytest.mark.quick


def names(trace) -> list[tuple[int, str]]:
    return [(e.device, e.name) for e in trace.events]


def test_a_cpu_device_is_named_by_each_operation_whatever_thread_ran_it():
    host = plane(
        "/host:CPU",
        line("python", event("meshwright profile", 0, 100)),
        line(
            "tf_XLAPjRtCpuClient/1",
            event("dot.1", 0, 10, hlo_op="dot.1", hlo_module="jit_f", device_ordinal=1),
            event("end: dot.1", 9, 10),
            event("Rendezvous", 20, 30, num_threads=2),
            event("while.2", 40, 90, hlo_op="while.2", device_ordinal=0),
            event("add.3", 45, 50, hlo_op="add.3", device_ordinal=0),
        ),
        line("tf_XLAPjRtCpuClient/2", event("dot.1", 5, 15, hlo_op="dot.1", device_ordinal=0)),
    )
    trace = read_planes([host])
    assert names(trace) == [(1, "dot.1"), (0, "add.3"), (0, "dot.1")]
    assert trace.window == (0, 100)


def test_a_gpu_has_streams_and_copies_from_the_host_are_left_out():
    gpu = plane(
        "/device:GPU:1",
        line(
            "Stream #13(Compute)",
            event("loop_add_fusion", 0, 10, hlo_op="fusion.4", hlo_module="jit_step"),
            event("MemcpyH2D", 10, 20),
            event("cutlass_gemm", 20, 30),
        ),
        line("Stream #14(Memcpy)", event("MemcpyD2D", 12, 18, hlo_op="copy.1")),
        line("Launch Stats", event("dot.9", 0, 50)),
    )
    trace = read_planes([mark(0, 100), gpu])
    assert names(trace) == [(1, "fusion.4"), (1, "cutlass_gemm"), (1, "copy.1")]


def test_a_tpu_has_a_line_of_operations():
    tpu = plane(
        "/device:TPU:0",
        line("Steps", event("0", 0, 60)),
        line("XLA Modules", event("jit_step(123)", 0, 60)),
        line("XLA Ops", event("%fusion.3 = f32[8]{0} fusion(%p), kind=kLoop", 0, 10)),
        line("Async XLA Ops", event("%all-gather-start.1 = (…)", 5, 20)),
    )
    trace = read_planes([mark(0, 60), tpu])
    assert names(trace) == [(0, "fusion.3"), (0, "all-gather-start.1")]


def test_only_the_marked_time_counts_and_without_a_mark_all_of_it():
    stream = line("Stream #1", *(event(f"k{n}", 10 * n, 10 * n + 5) for n in range(5)))
    gpu = plane("/device:GPU:0", stream)
    assert names(read_planes([mark(15, 32), gpu])) == [(0, "k2"), (0, "k3")]
    assert read_planes([gpu]).window == (0, 45)


def test_a_trace_without_devices_or_without_a_file_is_named(tmp_path):
    with pytest.raises(EnvironmentProblem, match="no operation of a device"):
        read_planes([mark(0, 10)])
    with pytest.raises(EnvironmentProblem, match="there is no trace"):
        read_trace(tmp_path)
