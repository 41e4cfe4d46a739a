"""Times of collectives: closed forms, and what must hold for any machine."""

import dataclasses

import pytest

from meshwright.compiled.collectives import ring_bytes
from meshwright.errors import UserError
from meshwright.hardware import load_chips, parse_hardware
from meshwright.planner.devices.links import AxisLink, axis_links, collective_seconds

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")
LARGE = 1e9


def link_of(hardware, **mesh):
    """Return the hardware and the link of the last axis."""
    parsed = parse_hardware(hardware)
    return list(axis_links(parsed, mesh).values())[-1], parsed


def seconds(kind, nbytes, hardware, **mesh):
    link, parsed = link_of(hardware, **mesh)
    return collective_seconds(kind, nbytes, link, parsed)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_a_ring_takes_its_bytes_and_its_steps(kind, n):
    chip = load_chips()["H100"]
    steps = (2 if kind == "all-reduce" else 1) * (n - 1)
    sent = ring_bytes(kind, LARGE, n) / (450e9 * chip.link_share)
    expected = sent + steps * chip.intra_node_latency_us * 1e-6
    assert seconds(kind, LARGE, f"{n}xH100", fsdp=n) == pytest.approx(expected, rel=1e-12)


def test_small_all_reduces_use_trees():
    latency = load_chips()["GB200"].intra_node_latency_us * 1e-6
    # A ring of 64 has 126 steps, two trees have 12.
    assert seconds("all-reduce", 1, "64xGB200", data=64) == pytest.approx(12 * latency, rel=1e-3)


def test_an_axis_over_two_nodes_sends_a_part_per_device():
    chip, nodes, inside = load_chips()["H100"], 2, 8
    fast, network = 450e9 * chip.link_share, 50e9 * chip.link_share
    stages = 7 / 8 * LARGE / fast + (nodes - 1) / nodes * LARGE / inside / network
    rings = 15 / 16 * LARGE / min(fast, inside * network)
    found = seconds("all-gather", LARGE, "2x8xH100", fsdp=16)
    assert found == pytest.approx(min(stages, rings), rel=0.02)


def test_an_axis_across_nodes_only_has_the_network():
    link, _ = link_of("2x8xH100", data=2, tensor=8)
    assert (link.axis, link.inside, link.nodes) == ("tensor", 8, 1)
    hardware = parse_hardware("2x8xH100")
    data = axis_links(hardware, {"data": 2, "tensor": 8})["data"]
    assert (data.inside, data.nodes) == (1, 2)
    assert data.gb_per_s == 50 * hardware.chip.link_share
    assert data.latency_s == hardware.chip.inter_node_latency_us * 1e-6
    sent = LARGE / (data.gb_per_s * 1e9)
    found = collective_seconds("all-reduce", LARGE, data, hardware)
    assert found == pytest.approx(sent + 2 * data.latency_s, rel=1e-9)
    assert collective_seconds("point-to-point", LARGE, data, hardware) == pytest.approx(
        sent + data.latency_s
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hardware", ["2x8xH100", "16xMI300X", "16xv5p", "16xCPU", "8xTPU7x"])
def test_more_bytes_take_longer(kind, hardware):
    parsed = parse_hardware(hardware)
    times = [seconds(kind, 4.0**i, hardware, fsdp=parsed.count) for i in range(20)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1]


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_more_devices_take_longer(kind, nbytes):
    times = [seconds(kind, nbytes, f"{n}xH100", fsdp=n) for n in (2, 4, 8, 16, 32, 64)]
    assert times[0] > 0
    assert times == sorted(times)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", ["H100", "A100-80GB", "TPU-v5e", "V100-32GB", "CPU"])
def test_inside_a_node_is_faster_than_across(kind, chip):
    inside = seconds(kind, LARGE, f"1x2x{chip}", fsdp=2)
    across = seconds(kind, LARGE, f"2x1x{chip}", fsdp=2)
    assert inside < across


def test_a_torus_sends_in_all_directions():
    one, both = link_of("256xv5e", data=16, fsdp=16)[0], link_of("256xv5e", fsdp=256)[0]
    share = load_chips()["TPU-v5e"].link_share
    assert one.gb_per_s == pytest.approx(2 * 45 * share)
    assert both.gb_per_s == pytest.approx(4 * 45 * share)
    # A message to any of 256 chips crosses 8 links on average, which all-to-alls share.
    assert seconds("all-to-all", LARGE, "256xv5e", fsdp=256) > 7 * seconds(
        "all-gather", LARGE, "256xv5e", fsdp=256
    )


def test_devices_of_one_chip_share_its_links():
    fsdp = axis_links(parse_hardware("128xTPU7x"), {"fsdp": 64, "tensor": 2})["fsdp"]
    assert fsdp.gb_per_s == pytest.approx(600 / 2 * load_chips()["TPU7x"].link_share)


def test_axes_of_one_device_are_left_out_and_cost_nothing():
    hardware = parse_hardware("1xH100")
    assert axis_links(hardware, {"data": 1, "fsdp": 1}) == {}
    link = AxisLink("fsdp", 1, 1, 1, 1.0, 1.0, True, 1.0, 1.0, 0)
    assert all(collective_seconds(kind, LARGE, link, hardware) == 0 for kind in KINDS)


def test_aliases_and_order_do_not_matter():
    hardware = parse_hardware("8xH100")
    assert axis_links(hardware, {"tp": 2, "fsdp": 4}) == axis_links(
        hardware, {"fsdp": 4, "tensor": 2}
    )


def test_bad_meshes_and_kinds_are_explained():
    hardware = parse_hardware("8xH100")
    with pytest.raises(UserError, match="does not match the 8 devices"):
        axis_links(hardware, {"fsdp": 4})
    with pytest.raises(UserError, match="did you mean `all-reduce`"):
        collective_seconds("allreduce", 1, link_of("8xH100", fsdp=8)[0], hardware)
    with pytest.raises(UserError, match=r"inter_node_gb_per_s for chips\.TPU-v6e"):
        axis_links(parse_hardware("2x256xv6e"), {"data": 2, "fsdp": 256})


def test_the_network_of_an_own_chip_decides():
    hardware = parse_hardware("2x8xH100")
    slow = dataclasses.replace(
        hardware, chip=dataclasses.replace(hardware.chip, inter_node_gb_per_s=1.25)
    )
    fast, slower = (
        collective_seconds("all-reduce", LARGE, axis_links(h, {"data": 2, "fsdp": 8})["data"], h)
        for h in (hardware, slow)
    )
    assert slower == pytest.approx(40 * fast, rel=0.01)
