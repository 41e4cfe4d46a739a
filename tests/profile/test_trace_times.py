"""Times by device and collective: in a trace made by hand, and in a real one."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from trace_planes import event, line, mark, plane

import meshwright as mw
from meshwright.profile import Profiler, read_profile
from meshwright.profile.events import read_planes
from meshwright.profile.trace_times import (
    CollectiveNames,
    collective_times,
    device_numbers,
    split_times,
)

pytestmark = pytest.mark.quick


def test_overlapped_communication_counts_as_computing():
    gpu = plane(
        "/device:GPU:0",
        line("Stream #1", event("gemm", 0, 40), event("gemm", 60, 80)),
        line("Stream #2", event("ncclDevKernel_AllReduce", 30, 70)),
    )
    other = plane("/device:GPU:1", line("Stream #1", event("gemm", 0, 20)))
    unused = plane("/device:GPU:2", line("Stream #1", event("gemm", 0, 99)))
    trace = read_planes([mark(0, 100), gpu, other, unused])
    (first, second), found = split_times(trace, CollectiveNames(None, {}), {0: 4, 1: 5})
    nanoseconds = [first.compute, first.communication, first.hidden, first.idle]
    assert [round(1e9 * n) for n in nanoseconds] == [60, 20, 20, 20]
    assert (first.device, second.device) == (4, 5)
    assert round(1e9 * second.idle) == 80
    (time,) = collective_times(found, runs=2)
    assert (time.kind, time.count, time.bytes) == ("all-reduce", 0.5, None)
    assert time.seconds == pytest.approx(40e-9 / 2)
    assert time.exposed_seconds == pytest.approx(20e-9 / 2)


@pytest.mark.parametrize(
    ("devices", "traced", "expected"),
    [
        ([(2048, 0), (2049, 1)], {2048, 2049}, {2048: 2048, 2049: 2049}),
        ([(2, 2), (3, 3)], {2, 3}, {2: 2, 3: 3}),
        ([(6, 0), (7, 1)], {0, 1}, {0: 6, 1: 7}),
        ([(6, None), (7, None)], {4, 5}, {4: 6, 5: 7}),
    ],
)
def test_devices_of_a_trace_are_found_among_those_of_jax(devices, traced, expected):
    found = [SimpleNamespace(id=number, local_hardware_id=own) for number, own in devices]
    assert device_numbers(found, traced) == expected


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Profile three runs of a loop of four products, each reduced over one of two axes."""
    mesh = mw.build_mesh({"fsdp": 4, "tensor": 2})

    def local(x, w):
        def body(carry, _):
            partial = jax.lax.psum(carry @ w, "tensor")
            return jax.numpy.tanh(partial), None

        x = jax.lax.scan(body, x, length=4)[0]
        return jax.lax.psum(x, "fsdp")

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec("fsdp"), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    place = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.ones((16, 64), "float32"), NamedSharding(mesh, PartitionSpec("fsdp")))
    w = jax.device_put(np.ones((64, 64), "float32"), place)
    compiled = run.lower(x, w).compile()
    profiler = Profiler(tmp_path_factory.mktemp("profile"), steps=3)
    profiler.start(compiled(x, w))
    for _ in range(profiler.steps):
        out = compiled(x, w)
    profiler.stop(out)
    return profiler, mesh, compiled


def test_a_real_trace_names_every_collective_of_every_device(profiled):
    profiler, mesh, compiled = profiled
    profile = read_profile(profiler.trace, mesh, compiled.as_text(), steps=3)
    assert [device.device for device in profile.devices] == list(range(8))
    found = {c.axis: (c.kind, c.count, c.bytes) for c in profile.collectives}
    # In a ring of n, each device sends 2(n-1)/n of what is reduced.
    assert found == {
        "tensor": ("all-reduce", 4, 4 * (4 * 64 * 4)),
        "fsdp": ("all-reduce", 1, round(2 * 3 / 4 * 4 * 64 * 4)),
    }
    assert sum(profile.shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in profile.shares.values())
    assert profile.shares["compute"] > 0
    assert profile.shares["communication"] > 0
    assert profile.load_balance >= 1


def test_without_the_program_kinds_are_still_known(profiled):
    profiler, mesh, _ = profiled
    profile = read_profile(profiler.trace, mesh, None, steps=profiler.steps)
    assert [(c.axis, c.kind, c.count) for c in profile.collectives] == [
        ("unknown", "all-reduce", 5)
    ]


def test_the_trace_can_be_opened_elsewhere(profiled):
    profiler, _, _ = profiled
    (folder,) = profiler.trace.glob("plugins/profile/*")
    assert {"".join(file.suffixes[-2:]) for file in folder.iterdir()} >= {
        ".xplane.pb",
        ".json.gz",
    }
