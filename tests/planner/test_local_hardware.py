"""``hardware=local``: this machine is measured once, and what was measured is kept."""

import dataclasses
import json

import jax
import pytest

from meshwright.errors import UserError
from meshwright.hardware import detect, load_chips, parse_hardware
from meshwright.host_memory import host_memory
from meshwright.planner import local_hardware
from meshwright.planner.links import axis_links, collective_seconds
from meshwright.planner.local_hardware import chip_yaml, find_hardware, measure_local


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure two of the devices, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield measure_local(jax.devices()[:2], seconds=0.4)


@pytest.fixture
def no_measuring(monkeypatch):
    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(local_hardware, "_measure", refuse)


def test_the_figures_are_those_of_this_machine(measured):
    chip = measured.chip
    assert (measured.count, measured.nodes, str(measured)) == (2, 1, "2xCPU")
    assert chip.measured
    assert not load_chips()["CPU"].measured
    # Slower than any accelerator, faster than a pocket calculator.
    assert 1e6 < chip.product_flops_per_s(1e6, 1e6, 1e6, "float32") < 1e14
    assert 0 < chip.hbm_tb_per_s < 10
    assert 0 < chip.launch_us < 1e5
    memory = host_memory()
    total = min(filter(None, (memory["host_total_bytes"], memory["container_limit_bytes"])))
    assert chip.usable_gb_per_device == pytest.approx(0.9 * total / 2 / 1e9)


def test_links_say_how_long_sums_take(measured):
    link = axis_links(measured, {"fsdp": 2})["fsdp"]
    small, large = (collective_seconds("all-reduce", nbytes, link, measured) for nbytes in (4, 1e9))
    assert small == pytest.approx(2 * measured.chip.intra_node_latency_us * 1e-6, rel=0.01)
    assert large == pytest.approx(1e9 / (link.gb_per_s * 1e9) + small, rel=0.01)


@pytest.mark.usefixtures("no_measuring")
def test_a_measurement_is_kept_for_the_same_devices(measured):
    assert measure_local(jax.devices()[:2]) == measured
    with pytest.raises(AssertionError, match="measured again"):
        measure_local(jax.devices()[:2], refresh=True)
    with pytest.raises(AssertionError, match="measured again"):
        measure_local(jax.devices()[:4])


@pytest.mark.usefixtures("measured")
def test_a_damaged_measurement_is_made_again(monkeypatch, tmp_path):
    other = dataclasses.replace(load_chips()["CPU"], peak_tflops=2.0)
    monkeypatch.setattr(local_hardware, "_measure", lambda *_: other)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measure_local(jax.devices()[:2]).chip == other
    (file,) = (tmp_path / "meshwright" / "hardware").iterdir()
    for damaged in ("{", "[]", json.dumps({**json.loads(file.read_text()), "hbm_gb": -1})):
        file.write_text(damaged)
        assert measure_local(jax.devices()[:2]).chip == other
        assert json.loads(file.read_text())["peak_tflops"] == 2.0


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(local_hardware, "_measure", lambda *_: load_chips()["CPU"])
    (tmp_path / "meshwright").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measure_local(jax.devices()[:2]).chip == load_chips()["CPU"]


def test_the_setting_names_a_machine(monkeypatch):
    monkeypatch.setattr(local_hardware, "measure_local", lambda **_: "measured")
    assert find_hardware("2x8xH100") == parse_hardware("2x8xH100")
    assert find_hardware("local") == "measured"
    assert find_hardware(None) == detect()
    monkeypatch.setattr(local_hardware, "detect", lambda: None)
    assert find_hardware(None) == "measured"


def test_devices_must_be_of_one_kind():
    with pytest.raises(UserError, match="not of one kind"):
        measure_local([])


def test_a_listed_chip_keeps_its_published_figures(monkeypatch):
    chip = load_chips()["H200"]
    reached = local_hardware._reached(chip, "peak_tflops", "product_share", 0.8 * 989)
    assert (reached.peak_tflops, reached.product_share) == (989, pytest.approx(0.8))
    own = dataclasses.replace(chip, name="a chip of no table")
    reached = local_hardware._reached(own, "peak_tflops", "product_share", 500.0)
    assert (reached.peak_tflops, reached.product_share) == (500, 1)


def test_what_was_measured_can_be_planned_with_in_any_number(measured, monkeypatch, tmp_path):
    file = tmp_path / "hardware.yaml"
    file.write_text(chip_yaml(measured.chip, "workstation"))
    monkeypatch.setenv("MESHWRIGHT_HARDWARE", str(file))
    planned = parse_hardware("64xworkstation")
    assert planned.count == 64
    assert planned.chip.peak_tflops == pytest.approx(measured.chip.peak_tflops, rel=1e-3)
    assert planned.chip.launch_us == pytest.approx(measured.chip.launch_us, rel=1e-3)
