"""HardwareType: a member for every chip, and no guesses."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.distributed import HardwareType
from meshwright.hardware import load_chips


def test_every_chip_has_a_member_and_every_member_a_chip():
    families = {chip.family for chip in load_chips().values()}
    assert {kind.value for kind in HardwareType} == {*families, "unknown"}


def test_documented_names_and_values():
    assert HardwareType.H100.value == "h100"
    assert HardwareType.TPU_V5E.value == "tpu_v5e"
    assert HardwareType.CPU.value == "cpu"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H200", HardwareType.H200),
        ("NVIDIA A100-SXM4-80GB", HardwareType.A100),
        ("TPU7x", HardwareType.TPU_7X),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", HardwareType.UNKNOWN),
    ],
)
def test_detects_fake_devices(kind, expected):
    fake = SimpleNamespace(device_kind=kind, process_index=0)
    assert HardwareType.detect([fake, fake]) is expected


def test_a_chip_of_the_users_own_is_of_no_listed_kind(tmp_path, monkeypatch):
    file = tmp_path / "hardware.yaml"
    file.write_text("chips: {Toy: {like: H100, family: toy, device_kinds: [Toy 1]}}")
    monkeypatch.setenv("MESHWRIGHT_HARDWARE", str(file))
    fake = SimpleNamespace(device_kind="Toy 1", process_index=0)
    assert HardwareType.detect([fake]) is HardwareType.UNKNOWN


def test_detects_the_devices_that_are_here():
    assert HardwareType.detect() is HardwareType.CPU


def test_unknown_has_its_own_batch_sizes():
    assert HardwareType.UNKNOWN.batch_sizes.critical_batch_size == 64
    assert HardwareType.A100.batch_sizes.critical_batch_size == 240


def test_documented_table_is_the_real_one():
    page = Path(__file__).parents[2] / "docs" / "distributed-api.md"
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+) \| (\d+) \|$", page.read_text("utf-8"), re.M)
    documented = {
        name.lower().replace("tpu7", "tpu_7").replace(" ", "_"): tuple(map(int, sizes))
        for name, *sizes in rows
    }
    assert documented == {
        kind.value: (
            kind.batch_sizes.min_batch_size,
            kind.batch_sizes.optimal_batch_size,
            kind.batch_sizes.critical_batch_size,
        )
        for kind in HardwareType
    }
