"""The doctor finds what is wrong, says what to do, and never falls ill itself."""

import copy
import io
import json
import subprocess
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from real_processes import run_processes
from rich.console import Console

from meshwright.cli import doctor
from meshwright.cli.doctor import all_reduce, machine
from meshwright.cli.doctor.warnings import disagreements, find_warnings
from meshwright.errors import ExitCode


@pytest.fixture(scope="module")
def report():
    return doctor.collect()


@pytest.fixture
def healthy(report):
    """A report of a machine with nothing to warn about, free to be changed."""
    changed = copy.deepcopy(report)
    changed["disk"] = {"total_bytes": 10**12, "free_bytes": 10**11}
    changed["memory"] |= {"host_total_bytes": 10**11, "host_available_bytes": 10**11}
    return changed | {"accelerators": [], "environment": {}, "ranks": [], "warnings": []}


def printed(report):
    out = io.StringIO()
    Console(file=out, width=80).print(doctor.render(report))
    return out.getvalue()


def problems(report):
    return [warning["problem"] for warning in find_warnings(report)]


def test_eight_devices_add_up(report):
    assert report["devices"] == 8
    assert report["all_reduce_ok"] is True
    assert report["all_reduce"] == {
        "ok": True,
        "expected": 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8,
        "wrong_devices": [],
        "error": None,
    }
    assert (report["process_index"], report["process_count"], report["local_devices"]) == (0, 1, 8)
    assert report["device_kinds"] == {"cpu": 8}
    assert [device["id"] for device in report["device_list"]] == list(range(8))


def test_the_report_is_json(report):
    assert json.loads(json.dumps(report)) == report


def test_versions_are_those_installed(report):
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["numpy"] == np.__version__
    assert report["versions"]["orbax"] == metadata.version("orbax-checkpoint")
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"meshwright", "jaxlib", "flax", "optax", "grain", "hydra", "pydantic"} <= set(
        report["versions"]
    )


@pytest.mark.full
def test_the_command_prints_one_json_value_on_stdout():
    run = subprocess.run(
        [sys.executable, "-m", "meshwright", "doctor", "simulate=8", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["devices"], report["all_reduce_ok"]) == (8, True)


def received(ids):
    return {device: np.arange(1.0, len(ids) + 1) for device in ids}


def test_what_every_device_received_is_the_closed_form():
    found = all_reduce.all_reduce(jax.devices()[:3])
    assert {device: vector.tolist() for device, vector in found.items()} == {
        0: [1, 2, 3],
        1: [1, 2, 3],
        2: [1, 2, 3],
    }


def test_a_device_that_sends_a_wrong_value_is_named():
    ids = [0, 1, 2048, 2049]
    vectors = received(ids)
    for vector in vectors.values():
        vector[2] += 0.5
    assert all_reduce.find_wrong(ids, vectors) == [{"id": 2048, "fault": "sends a wrong value"}]


def test_a_device_that_receives_a_wrong_sum_is_named():
    ids = [0, 1, 2, 3]
    vectors = received(ids)
    vectors[1][3] = np.nan
    assert all_reduce.find_wrong(ids, vectors) == [{"id": 1, "fault": "receives a wrong sum"}]
    assert all_reduce.find_wrong(ids, received(ids)) == []


def test_a_collective_that_fails_is_a_finding(monkeypatch):
    def fail(devices):
        raise RuntimeError("NCCL is unhappy\nand says so at length")

    monkeypatch.setattr(all_reduce, "all_reduce", fail)
    found = all_reduce.check_all_reduce(jax.devices())
    assert (found["ok"], found["error"]) == (False, "RuntimeError: NCCL is unhappy")


def test_a_collective_that_hangs_is_a_finding(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(all_reduce, "all_reduce", lambda devices: release.wait() and {})
    found = all_reduce.check_all_reduce(jax.devices(), timeout_seconds=0.05)
    release.set()
    assert (found["ok"], found["error"]) == (False, "no result within 0.05 s")


def test_a_jax_that_cannot_start_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    report = doctor.collect()
    assert (report["devices"], report["all_reduce_ok"]) == (0, False)
    assert "JAX cannot start: RuntimeError: Unable to initialize" in problems(report)[0]
    assert "There is no device to train on" in printed(report)
    results = []
    output = SimpleNamespace(result=lambda value, picture: results.append(value))
    assert doctor.run(SimpleNamespace(output=output)) == ExitCode.CHECK_FAILED
    assert results[0]["devices"] == 0


def test_only_variables_that_matter_are_read_and_no_secrets():
    environ = {
        "XLA_FLAGS": "--xla_x",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "MASTER_ADDR": "10.0.0.1",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "SLURM_PROCID": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    others = {"HOME": "/home/someone", "AWS_SECRET_ACCESS_KEY": "s3cret", "MY_RANK": "1"}
    assert machine.environment(environ | others) == environ
    hidden = machine.environment(
        {"SLURM_JWT": "s3cret", "JAX_COMPILATION_CACHE_DIR": "https://me:s3cret@host/cache"}
    )
    assert hidden == {
        "SLURM_JWT": "(hidden)",
        "JAX_COMPILATION_CACHE_DIR": "https://(hidden)@host/cache",
    }


def test_ranks_are_read_per_launcher():
    environ = {"RANK": "1", "WORLD_SIZE": "4", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "x"}
    told = machine.ranks(environ)
    variables = [entry.pop("variables") for entry in told]
    assert variables == [
        {"rank": "RANK", "world_size": "WORLD_SIZE"},
        {"rank": "OMPI_COMM_WORLD_RANK"},
    ]
    assert told == [
        {"source": "environment", "rank": 1, "world_size": 4, "local_rank": None},
        {"source": "Open MPI", "rank": None, "world_size": None, "local_rank": None},
    ]


def test_accelerators_are_seen_without_jax(tmp_path):
    (tmp_path / "dev").mkdir()
    assert machine.accelerators(tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "kfd"):
        (tmp_path / "dev" / name).touch()
    assert machine.accelerators(tmp_path) == ["NVIDIA GPU", "AMD GPU"]


def test_device_memory_is_told_where_it_is_counted():
    def unsupported():
        raise NotImplementedError

    place = {"id": 3, "device_kind": "NVIDIA H200", "process_index": 1}
    counted = SimpleNamespace(**place, memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 7})
    told = machine.device(counted)
    assert told["kind"] == "NVIDIA H200"
    assert (told["memory_total_bytes"], told["memory_used_bytes"]) == (100, 7)
    assert machine.device(SimpleNamespace(**place, memory_stats=unsupported)) == told | {
        "memory_total_bytes": None,
        "memory_used_bytes": None,
    }


def test_a_healthy_machine_gets_no_warnings(healthy):
    assert find_warnings(healthy) == []


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        (
            {"device_kinds": {"NVIDIA H200": 6, "NVIDIA A100": 2}},
            "devices of different kinds: 2 × NVIDIA A100, 6 × NVIDIA H200",
            "machines of one kind",
        ),
        (
            {"accelerators": ["NVIDIA GPU"], "cpu_chosen": False},
            "this machine has NVIDIA GPU devices, but JAX uses the CPU",
            "meshwright[cuda12]",
        ),
        (
            {"accelerators": ["NVIDIA GPU"], "environment": {"JAX_PLATFORMS": "cpu"}},
            "but JAX uses the CPU: JAX_PLATFORMS=cpu",
            "unset JAX_PLATFORMS",
        ),
        (
            {"accelerators": ["NVIDIA GPU"], "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            "CUDA_VISIBLE_DEVICES hides them",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            {"environment": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}},
            "XLA_FLAGS makes virtual CPU devices",
            "simulate=N",
        ),
        (
            {"backend": "gpu", "environment": {"NCCL_P2P_DISABLE": "1"}},
            "NCCL_P2P_DISABLE=1 turns fast links off",
            "unset NCCL_P2P_DISABLE",
        ),
        (
            {"disk": {"total_bytes": 10**12, "free_bytes": 10**9}},
            "only 1.0 GB free",
            "hydra.run.dir",
        ),
        (
            {"memory": {"host_total_bytes": 10**11, "host_available_bytes": 10**9}},
            "only 1.0 GB of 100.0 GB host memory",
            "stop other programs",
        ),
    ],
)
def test_a_problem_comes_with_its_remedy(healthy, change, problem, remedy):
    (warning,) = find_warnings(healthy | change)
    assert problem in warning["problem"]
    assert remedy in warning["remedy"]


@pytest.mark.parametrize(
    ("rank", "size", "problem"),
    [
        (0, 4, "SLURM says 4 processes, JAX runs 1"),
        (4, 4, "SLURM says rank 4 of 4"),
        (None, 4, "the rank or size from SLURM is missing or not a number"),
    ],
)
def test_ranks_that_do_not_fit_are_told(healthy, rank, size, problem):
    healthy["ranks"] = [{"source": "SLURM", "rank": rank, "world_size": size, "local_rank": 0}]
    assert problems(healthy) == [problem]


def test_launchers_that_disagree_are_told(healthy):
    healthy |= {"process_count": 2, "process_index": 1}
    healthy["ranks"] = [
        {"source": "environment", "rank": 0, "world_size": 2, "local_rank": 0},
        {"source": "SLURM", "rank": 1, "world_size": 2, "local_rank": 1},
    ]
    assert problems(healthy) == [
        "environment says rank 0, JAX says process 1",
        "environment (rank 0) and SLURM (rank 1) disagree",
    ]


def test_a_missing_package_and_a_mismatch_are_told(healthy):
    healthy["versions"] |= {"grain": None, "jax": "0.12.1", "jaxlib": "0.11.2"}
    assert problems(healthy) == [
        "grain is not installed",
        "jax 0.12.1 and jaxlib 0.11.2 do not match",
    ]


def test_a_wrong_device_is_told_by_name(healthy):
    healthy["all_reduce"]["wrong_devices"] = [{"id": 5, "fault": "sends a wrong value"}]
    healthy["all_reduce_ok"] = False
    assert problems(healthy) == ["device 5 sends a wrong value in an all-reduce"]
    assert "✗ The 8 devices do not work together." in printed(healthy)


def test_processes_that_differ_are_told():
    same, other = {"jax version": "0.12.0"}, {"jax version": "0.11.2"}
    assert disagreements([same, same]) == []
    (warning,) = disagreements([same, same, other])
    assert warning["problem"] == (
        "processes disagree on jax version: process 0 has 0.12.0, process 2 has 0.11.2"
    )


WORKER = """
import json, sys

from meshwright import processes
from meshwright.cli import doctor

processes.connect(sys.argv[1], 2, int(sys.argv[2]), timeout_seconds=60)
print(json.dumps(doctor.collect()))
"""


@pytest.mark.full
def test_two_processes_examine_themselves_together():
    environments = [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}]
    environments[0]["XLA_FLAGS"] = ""
    environments[1]["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
    reports = run_processes(WORKER, count=2, environments=environments)
    for index, report in enumerate(reports):
        assert (report["devices"], report["local_devices"]) == (2, 1)
        assert (report["process_index"], report["process_count"]) == (index, 2)
        assert report["all_reduce_ok"] is True
        assert report["all_reduce"]["expected"] == 1 + 2
        told = [warning["problem"] for warning in report["warnings"]]
        assert [problem for problem in told if "disagree" in problem] == [
            "processes disagree on XLA_FLAGS: process 0 has none, "
            "process 1 has --xla_cpu_enable_fast_math=false"
        ]
        assert not [problem for problem in told if "rank" in problem]


def test_the_page_ends_with_a_block_for_bug_reports(healthy):
    healthy["warnings"] = [{"problem": "the disk is full", "remedy": "make room"}]
    healthy["environment"] = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "[bold]x"}
    page = printed(healthy)
    assert "✓ The 8 devices work together: 1 + … + 8 = 36 on each." in page
    assert "! the disk is full\n  make room\n" in page
    block = page[page.index("```text") :].rstrip().splitlines()
    assert block[-1] == "```"
    assert "all-reduce: right" in block
    assert "devices: 8 × cpu, virtual" in block
    assert "environment: JAX_PLATFORMS=cpu" in block
    assert "environment: XLA_FLAGS=[bold]x" in block
    assert "warning: the disk is full" in block
    assert max(len(line) for line in page.splitlines()) <= 80
