"""A launch inside another launcher is refused before anything starts."""

import subprocess
import sys

import pytest

from meshwright.cli.main import main

OTHERS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "JAX_PROCESS_ID",
)


@pytest.fixture
def launch(monkeypatch, capfd):
    """Launch `doctor --help` in two processes, which starts nothing of JAX."""
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)

    def run(**environ: str) -> tuple[int, str]:
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        code = main(["launch", "--nprocs=2", "doctor", "--help"])
        return code, capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "10.0.0.1", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4"},
        {"WORLD_SIZE": "2"},
        {"MASTER_ADDR": "node7.example.org"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "3"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "2", "PMI_RANK": "1"},
        {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2"},
        {"JAX_PROCESS_ID": "1"},
        {"JAX_COORDINATOR_ADDRESS": "node7:1234"},
    ],
    ids=lambda environ: " ".join(environ),
)
def test_it_names_both_sources(launch, environ):
    code, err = launch(**environ)
    assert code == 2
    assert "--nprocs 2 describe different processes" in err
    shown = {name: text for name, text in environ.items() if name != "LOCAL_RANK"}
    assert all(f"{name}={text}" in err for name, text in shown.items())
    assert "run `unset " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node7"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
        {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "1"},
    ],
    ids=lambda environ: " ".join(environ) or "none",
)
def test_variables_of_one_process_are_no_obstacle(launch, environ):
    code, err = launch(**environ)
    assert code == 0, err


def test_the_module_refuses_as_well():
    environ = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.launch", "--nprocs=2", "doctor"],
        env={"PATH": "", **environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "MASTER_ADDR=10.0.0.1 RANK=2 WORLD_SIZE=4" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("words", [["launch", "--nprocs=2", "doctor"], ["doctor"], ["train"]])
def test_a_rank_alone_is_refused_the_same_way_everywhere(monkeypatch, capfd, rank, words):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(words) == 2
    assert capfd.readouterr().err.splitlines()[:3] == [
        f"error: RANK={rank} means that there are other processes, but WORLD_SIZE is not set",
        "  without joining them, each process would train a model of its own",
        "  export WORLD_SIZE=… in each process, or run `unset RANK` to train in this process alone",
    ]
