"""Launched processes join each other, share one config, and let only process 0 speak."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import processes
from meshwright.cli.main import main
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.launch.connect import (
    connect_processes,
    devices_per_process,
    explain_lost_peer,
    is_main,
)
from meshwright.launch.whole_run import free_port

LIMIT_SECONDS = 120


def launch(*words: str, cwd=None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "launch", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full
def test_two_processes_with_two_devices_are_one_machine_to_doctor():
    code, out, err = launch("--nprocs=2", "--devices-per-process=2", "--", "doctor", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["devices"], report["local_devices"], report["process_count"]) == (4, 2, 2)
    assert report["all_reduce_ok"]
    assert report["ranks"] == [
        {
            **{"source": "environment", "rank": 0, "world_size": 2, "local_rank": 0},
            "variables": {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"},
        }
    ]
    assert report["coordinator"]["address"] == "127.0.0.1"
    assert report["coordinator"]["variable"] == "MASTER_ADDR"
    assert not [w for w in report["warnings"] if "disk" not in w["problem"]]
    # On a slow machine, process 0 alone says what it waited for.
    assert {line.partition(" … ")[0] for line in err.splitlines()} <= {
        "[0] starting JAX", "[0] checking 4 devices"
    }  # fmt: skip


@pytest.mark.full
def test_processes_started_by_hand_join_by_the_variables_of_jax():
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", "doctor", "--json"],
            env=os.environ
            | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
            | {"JAX_PROCESS_ID": str(index), "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in started]
    report = json.loads(outs[0])
    assert (report["devices"], report["local_devices"], report["process_count"]) == (4, 2, 2)
    assert [entry["source"] for entry in report["ranks"]] == ["JAX"]
    assert outs[1] == ""


def test_half_of_the_variables_of_jax_never_train_alone(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1234")
    assert main(["train", "model=mlp"]) == 2
    out, err = capfd.readouterr()
    assert "JAX_PROCESS_ID is not set" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
    assert not out


def test_a_file_named_like_a_library_is_not_run_and_the_users_model_is_found(tmp_path):
    (tmp_path / "yaml.py").write_text("raise SystemExit('the yaml.py of the folder was run')")
    (tmp_path / "own_net.py").write_text(
        "from flax import nnx\n"
        "class Net(nnx.Module):\n"
        "    def __init__(self, *, width: int = 3, rngs: nnx.Rngs): pass\n"
    )
    words = ("model.kind=own_net:Net", "model.width=5", "--json")
    started = subprocess.run(
        [sys.executable, "-P", "-m", "meshwright", "launch", "--nprocs=1", "--", "config", *words],
        **{"capture_output": True, "text": True, "cwd": tmp_path, "timeout": LIMIT_SECONDS},
    )
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout)["model.width"]["value"] == 5


@pytest.mark.full
def test_a_process_alone_names_the_others_or_who_holds_its_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        common = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MESHWRIGHT_JOIN_TIMEOUT": "1"}
        environs = [
            {"RANK": "0", "MASTER_PORT": port},
            {"RANK": "0", "MASTER_PORT": str(free_port())},
            {"RANK": "3", "MASTER_PORT": str(free_port())},
        ]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "meshwright", "doctor"],
                env={**os.environ, "JAX_PLATFORMS": "cpu", **common, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environ in environs
        ]
        outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in started]
    assert [process.returncode for process in started] == [2, 1, 1]
    errors = [err for _, err in outputs]
    assert f"port {port}, on which process 0 is to listen, is taken" in errors[0]
    assert f"process {os.getpid()} listens there" in errors[0]
    assert "error: 1 of 4 processes joined, missing processes 1, 2, 3 after 1 s" in errors[1]
    assert "error: process 3 of 4 cannot join process 0 at 127.0.0.1" in errors[2]
    assert "nothing listens on" in errors[2]
    for out, err in outputs:
        assert out == ""
        assert "Traceback" not in err
        assert "Check failure" not in err


@pytest.mark.full
def test_a_run_goes_on_in_several_processes(tmp_path):
    run = ["--nprocs=2", "--devices-per-process=1", "--"]
    train = ["train", "model=mlp", "mesh.fsdp=2", "mesh.data=1", "hydra.run.dir=run"]
    for steps in (1, 2):
        code, _, err = launch(*run, *train, f"training.steps={steps}", cwd=tmp_path)
        assert code == 0, err
    assert "continuing after step 1" in err


@pytest.mark.full
def test_a_mesh_spans_processes_and_a_script_can_join_them(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import json\n"
        "from meshwright.distributed import setup_multinode\n"
        "info = setup_multinode()\n"
        "import meshwright as mw\n"
        "mesh = mw.build_mesh({'fsdp': 4})\n"
        "print(json.dumps([info['rank'], [d.process_index for d in mesh.devices.flat]]))\n"
    )
    code, out, err = launch("--nprocs=2", "--devices-per-process=2", str(script))
    assert code == 0, err
    assert json.loads(out) == [0, [0, 0, 1, 1]]
    assert "[1] [1, [0, 0, 1, 1]]" in err


# tests/processes/test_handshake.py has a mistake that all processes find every day.
@pytest.mark.full
def test_a_contradiction_is_told_once_with_exit_code_2():
    words = ("--nprocs=2", "--devices-per-process=2", "--", "doctor", "simulate=8")
    code, out, err = launch(*words)
    assert (code, out) == (2, "")
    assert err.count("error: simulate=8 contradicts --devices-per-process 2") == 1
    assert err.count("2 processes × 2 devices = 4, not 8") == 1


@pytest.mark.full
@pytest.mark.parametrize("command", ["inspect", "ledger"])
def test_commands_that_look_at_a_mesh_work_in_two_processes(command):
    overrides = ("simulate=4", "mesh.fsdp=4", "+experiment=quick_test", "--json")
    code, out, err = launch("--nprocs=2", "--", command, *overrides)
    assert code == 0, err
    assert json.loads(out)["mesh"] == {"fsdp": 4}


@pytest.mark.full
def test_a_profile_covers_the_devices_of_both_processes(tmp_path):
    overrides = ("model=mlp", "model.widths=[784,16,10]", "optimizer=sgd", "simulate=4")
    words = ("--nprocs=2", "--", "profile", *overrides, "--steps=2", "--json")
    code, out, err = launch(*words, cwd=tmp_path)
    assert code == 0, err
    report = json.loads(out)
    assert len(report["devices"]) == 4
    assert all(device["compute"] > 0 for device in report["devices"])
    assert {c["axis"] for c in report["collectives"]} == {"data"}


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_training_ends_everywhere_when_one_process_is_killed(tmp_path, rank):
    command = [sys.executable, "-m", "meshwright", "launch", "--nprocs=2", "--", "train"]
    overrides = ("model=mlp", "model.widths=[784,16,10]", "optimizer=sgd", "simulate=4")
    launcher = subprocess.Popen(
        [*command, *overrides, "training.steps=1000000"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "loss" in line:
                break
        workers = {rank_of(pid): pid for pid in children(launcher.pid)}
        os.kill(workers[rank], signal.SIGKILL)
        _, err = launcher.communicate(timeout=LIMIT_SECONDS)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL
    assert f"error: process {rank} was killed by SIGKILL" in err
    assert "Check failure stack trace" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def rank_of(pid: int) -> int | None:
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next((int(text[5:]) for text in environ if text.startswith("RANK=")), None)


@pytest.mark.parametrize(
    ("simulate", "world", "given", "expected"),
    [(8, 1, None, 8), (8, 2, None, 4), (8, 2, "4", 4), (8, 1, "2", 8)],
)
def test_simulated_devices_are_divided(simulate, world, given, expected):
    environ = {} if given is None else {"JAX_NUM_CPU_DEVICES": given}
    assert devices_per_process(simulate, world, environ) == expected


@pytest.mark.parametrize(
    ("simulate", "world", "given", "fix"),
    [(8, 3, None, "write simulate=6 or 9"), (1, 2, None, "write simulate=2"), (8, 2, "2", "=4")],
)
def test_devices_that_do_not_come_out_even_are_refused(simulate, world, given, fix):
    environ = {} if given is None else {"JAX_NUM_CPU_DEVICES": given}
    with pytest.raises(UserError, match=fix):
        devices_per_process(simulate, world, environ)


def test_one_process_connects_to_nobody():
    connect_processes(environ={})
    assert is_main({})
    assert is_main({"RANK": "0", "WORLD_SIZE": "2"})
    assert not is_main({"RANK": "1", "WORLD_SIZE": "2"})


def test_connecting_after_jax_has_started_is_refused():
    import jax

    jax.devices()
    with pytest.raises(EnvironmentProblem, match="too late"):
        connect_processes(environ={"RANK": "1", "WORLD_SIZE": "2"})


class JaxRuntimeError(RuntimeError):
    """Named as JAX names it."""


def test_a_lost_peer_is_explained_among_several_processes(monkeypatch):
    error = JaxRuntimeError("Gloo all-reduce failed: Connection reset by peer")
    assert explain_lost_peer(error) is None
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    assert explain_lost_peer(ValueError("no")) is None
    explained = explain_lost_peer(error)
    assert explained is not None
    assert "lost its connection to another process" in explained.what
    assert explained.why == str(error)
