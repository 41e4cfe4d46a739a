"""``hardware=local``: this machine is measured once, and what was measured is kept."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from meshwright.errors import UserError
from meshwright.hardware import detect, load_chips, parse_hardware
from meshwright.planner.devices import local_hardware
from meshwright.planner.devices.device_speed import Timed
from meshwright.planner.devices.links import axis_links, collective_seconds
from meshwright.planner.devices.local_hardware import chip_yaml, find_hardware, measure_local
from meshwright.runtime.host_machine import host_memory


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure two of the devices, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield measure_local(jax.devices()[:2], seconds=0.4)


@dataclasses.dataclass
class MadeUpTimer:
    """Times devices that are not here: half of the published figures of an H200."""

    devices: list
    seconds: float
    deadline: float

    def launch_seconds(self):
        return 2e-6

    def products(self, dtype, launch):
        return [self.product(dtype, size, launch) for size in (512, 2048, 8192)]

    def product(self, dtype, size, launch):
        rate = {"bfloat16": 989e12 / 2, "float16": 989e12 / 2, "float32": 989e12 / 5}[dtype]
        return Timed(size, 2 * size**3 / rate)

    def copy_bytes_per_s(self, nbytes):
        return 4.8e12 / 2

    def all_reduce_seconds(self, nbytes):
        count = len(self.devices)
        return 12e-6 + (2 * (count - 1) / count * nbytes / 225e9 if nbytes > 1024 else 0.0)


def gpus(kind, count):
    memory = {"bytes_limit": 100e9}
    gpu = SimpleNamespace(device_kind=kind, platform="gpu", memory_stats=lambda: memory)
    return [gpu] * count


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local_hardware, "DeviceTimer", MadeUpTimer)


@pytest.mark.usefixtures("made_up")
def test_of_a_known_chip_the_shares_are_measured():
    table, chip = load_chips()["H200"], measure_local(gpus("NVIDIA H200", 8)).chip
    assert chip == dataclasses.replace(
        table,
        product_share=pytest.approx(0.5),
        product_half_size=0,
        float32_share=pytest.approx(0.4),
        hbm_share=pytest.approx(0.5),
        memory_share=pytest.approx(100 / 141),
        launch_us=pytest.approx(2),
        link_share=pytest.approx(0.5, rel=0.01),
        intra_node_latency_us=pytest.approx(2),
        source=chip.source,
    )


@pytest.mark.usefixtures("made_up")
def test_of_an_unknown_chip_everything_is_measured():
    hardware = measure_local(gpus("NVIDIA GeForce RTX 9090", 2))
    chip = hardware.chip
    assert str(hardware) == "2xNVIDIA GeForce RTX 9090"
    assert (chip.platform, chip.peak_tflops) == ("cuda", pytest.approx(989 / 2))
    assert (chip.product_share, chip.hbm_share, chip.memory_share) == (1, 1, 1)
    assert (chip.hbm_gb, chip.hbm_tb_per_s) == (100, pytest.approx(2.4))
    assert chip.batch_sizes.critical_batch_size == round(989 / 2 / 2.4)
    assert axis_links(hardware, {"data": 2})["data"].gb_per_s == pytest.approx(225, rel=0.01)
    assert measure_local(gpus("NVIDIA GeForce RTX 9090", 1)).chip.hbm_gb == 100


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


def test_what_was_measured_can_be_planned_with_in_any_number(measured, monkeypatch, tmp_path):
    file = tmp_path / "hardware.yaml"
    file.write_text(chip_yaml(measured.chip, "workstation"))
    monkeypatch.setenv("MESHWRIGHT_HARDWARE", str(file))
    planned = parse_hardware("64xworkstation")
    assert planned.count == 64
    assert planned.chip.peak_tflops == pytest.approx(measured.chip.peak_tflops, rel=1e-3)
    assert planned.chip.launch_us == pytest.approx(measured.chip.launch_us, rel=1e-3)
