"""GPUs that are not here: what the compiler is told of them, and when there is none."""

import re
from dataclasses import replace

import pytest
from jax.experimental import topologies

from meshwright.errors import EnvironmentProblem
from meshwright.hardware import load_chips, parse_hardware
from meshwright.planner.devices import absent_gpus as module
from meshwright.planner.devices.absent_gpus import absent_gpus, can_compile_for, cudnn_version


class Topology:
    devices = ("one", "two")


@pytest.fixture
def asked(monkeypatch):
    """What JAX is asked for, with a compiler that is installed."""
    words: dict[str, str] = {}

    def get_topology_desc(**given):
        words.update(given)
        return Topology()

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(module, "COMPILERS", ("json.decoder",))
    return words


@pytest.mark.parametrize(
    ("text", "shape", "capability", "count", "memory"),
    [
        ("2x8xA100-40GB", "1x2x8", ("8", "0"), "108", "40000000000"),
        ("8xH200", "1x1x8", ("9", "0"), "132", "141000000000"),
        ("B200", "1x1x1", ("10", "0"), "148", "192000000000"),
    ],
)
def test_the_compiler_is_told_about_the_gpu(asked, text, shape, capability, count, memory):
    assert absent_gpus(parse_hardware(text)) == ["one", "two"]
    assert (asked["platform"], asked["topology"]) == ("cuda", shape)
    config = asked["target_config"]
    assert re.findall(r"cuda_compute_capability { major: (\d+) minor: (\d+) }", config) == [
        capability
    ]
    assert re.findall(r"core_count: (\d+)", config) == [count]
    assert re.findall(r"device_memory_size: (\d+)", config) == [memory]
    assert config.count("{") == config.count("}")


def test_a_compiler_that_refuses_is_quoted(asked, monkeypatch):
    def refuse(**given):
        raise RuntimeError("no such platform\nat line 3")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(EnvironmentProblem, match="JAX cannot compile for 8xH100") as caught:
        absent_gpus(parse_hardware("8xH100"))
    assert caught.value.why == "no such platform"


def test_a_compiler_and_the_processors_are_needed(monkeypatch):
    hardware = parse_hardware("8xH100")
    monkeypatch.setattr(module, "COMPILERS", ("no_such_package.of_ours", "json.no_such_module"))
    assert not can_compile_for(hardware)
    monkeypatch.setattr(module, "COMPILERS", ("no_such_package.of_ours", "json.decoder"))
    assert can_compile_for(hardware)
    assert not can_compile_for(replace(hardware, chip=replace(hardware.chip, cores=None)))


def test_every_nvidia_gpu_of_the_table_can_be_compiled_for():
    chips = load_chips().values()
    assert all((chip.cores is not None) == (chip.platform == "cuda") for chip in chips)


def test_a_release_of_cudnn_is_a_pair_of_numbers(monkeypatch):
    monkeypatch.setattr(module.metadata, "version", lambda name: "9.27.0.42")
    assert cudnn_version() == (9, 27)

    def missing(name):
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", missing)
    assert cudnn_version() == (9, 8)
