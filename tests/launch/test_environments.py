"""Where each process stands: ranks, the coordinator, virtual devices and GPUs."""

from importlib import metadata

import pytest

from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import UserError
from meshwright.launch.environments import count_gpus, environments
from meshwright.launch.options import LaunchOptions

pytestmark = pytest.mark.quick


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a machine with so many device files, and a plugin of this name installed."""

    def make(pattern: str = "", count: int = 0, plugin: str = ""):
        for number in range(count):
            file = tmp_path / "dev" / pattern.format(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        names = [plugin, "jax"]
        fakes = [type("Installed", (), {"name": name}) for name in names]
        monkeypatch.setattr(metadata, "distributions", lambda: fakes)
        return tmp_path

    return make


def test_every_process_reads_its_place_from_its_environment(machine):
    own = {"HOME": "/h", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "3", "RANK": "9"}
    places = environments(LaunchOptions(("doctor",), 3, devices_per_process=2), own, machine())
    configs = [DistributedConfig.from_environment(place) for place in places]
    assert [c.rank for c in configs] == [c.local_rank for c in configs] == [0, 1, 2]
    assert {(c.world_size, c.num_nodes, c.master_addr) for c in configs} == {(3, 1, "127.0.0.1")}
    assert len({c.master_port for c in configs}) == 1
    for place in places:
        assert place["HOME"] == "/h"
        assert place["JAX_NUM_CPU_DEVICES"] == "2"
        assert place["JAX_PLATFORMS"] == "cpu"
        assert not {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & set(place)


def test_virtual_devices_of_the_shell_do_not_multiply(machine):
    flags = "--xla_dump_to=/d --xla_force_host_platform_device_count=8"
    (place,) = environments(LaunchOptions(("doctor",), 1), {"XLA_FLAGS": flags}, machine())
    assert place["XLA_FLAGS"] == "--xla_dump_to=/d"
    assert "JAX_NUM_CPU_DEVICES" not in place


@pytest.mark.parametrize(
    ("nprocs", "each", "expected"),
    [(4, None, ["0", "1", "2", "3"]), (2, None, ["0,1", "2,3"]), (2, 1, ["0", "1"])],
)
def test_gpus_are_divided(machine, nprocs, each, expected):
    root = machine("nvidia{}", 4, "jax-cuda12-plugin")
    places = environments(LaunchOptions(("train",), nprocs, each), {}, root)
    assert [place["JAX_LOCAL_DEVICE_IDS"] for place in places] == expected
    assert all("JAX_PLATFORMS" not in place for place in places)


def test_more_processes_than_gpus_are_refused_and_simulated_ones_are_not(machine):
    root = machine("nvidia{}", 1, "jax-cuda12-plugin")
    with pytest.raises(UserError, match="this machine has 1"):
        environments(LaunchOptions(("train",), 2), {}, root)
    with pytest.raises(UserError, match="need 2 GPUs"):
        environments(LaunchOptions(("train",), 1, 2), {}, root)
    places = environments(LaunchOptions(("train", "simulate=8"), 2), {}, root)
    assert all("JAX_LOCAL_DEVICE_IDS" not in place for place in places)


def test_gpus_count_only_where_jax_would_use_them(machine):
    root = machine("nvidia{}", 4, "jax-cuda13-plugin")
    assert count_gpus({}, root) == 4
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, root) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, root) == 0
    assert count_gpus({"JAX_PLATFORMS": "cpu"}, root) == 0
    assert count_gpus({"JAX_PLATFORMS": "cuda,cpu"}, root) == 4
    assert count_gpus({}, machine(plugin="numpy")) == 0


def test_a_tpu_is_not_divided(machine):
    root = machine("accel{}", 4, "libtpu")
    with pytest.raises(UserError, match="belong to one process"):
        environments(LaunchOptions(("train",), 2), {}, root)
    assert len(environments(LaunchOptions(("train",), 2), {"JAX_PLATFORMS": "cpu"}, root)) == 2
