"""Faults of launched training: a run that is killed or hangs goes on as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.faults]

LIMIT_SECONDS = 240
SMALL = ("model=mlp", "model.widths=[784,16,10]", "optimizer=sgd", "simulate=2")
OFTEN = ("checkpoint.every=3", "tracking.log_every=1", "training.eval_every=100")

CALLBACK = """
import ctypes, os, signal, time
from pathlib import Path
import meshwright as mw

RANK = os.environ["RANK"]

def once(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

class Fault(mw.Callback):
    def on_log(self, update, metrics):
"""


def train(
    folder: Path, *flags: str, fault: str = "pass", more: str = "", steps: int = 10
) -> subprocess.Popen[str]:
    """Start training in two processes with a callback that does something after each update."""
    code = CALLBACK + textwrap.indent(textwrap.dedent(fault), " " * 8) + "\n"
    (folder / "fault.py").write_text(code + textwrap.indent(textwrap.dedent(more), " " * 4))
    words = (*SMALL, *OFTEN, f"training.steps={steps}", "training.callbacks=[fault:Fault]")
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "launch", "--nprocs=2", *flags, "--", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])},
    )


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = launcher.communicate(timeout=LIMIT_SECONDS)
    finally:
        launcher.kill()
    return launcher.returncode, err


def losses(folder: Path) -> dict[int, float]:
    """Return the losses of the only run below a folder, by update."""
    (file,) = (folder / "outputs").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["update"]: row["loss"] for row in rows if row["split"] == "train"}


def result(folder: Path) -> dict[str, float]:
    (file,) = (folder / "outputs").rglob("result.json")
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, err = finish(train(folder))
    assert code == 0, err
    assert 0 < result(folder)["goodput"] < 1
    return losses(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_restarted_and_the_losses_are_the_same(tmp_path, expected, rank):
    fault = f"""
        if update == 8 and RANK == "{rank}" and once("killed"):
            time.sleep(1)  # The checkpoint of update 6 gets written.
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code, err = finish(train(tmp_path, "--restarts=3", fault=fault))
    assert code == 0, err
    first = next(line for line in err.splitlines() if line.startswith("error: "))
    pattern = rf"error: process {rank} was killed by SIGKILL at update \d+; all processes are start"
    assert re.match(pattern, first), first
    assert "restart 1 of 3 in 1 s, from the checkpoint of update 6" in err
    assert "continuing after update 6" in err
    assert losses(tmp_path) == expected
    assert re.search(r"launch: goodput \d+%: .* in 2 attempts", err)
    assert 0 < result(tmp_path)["goodput"] < 1


def test_a_run_that_always_crashes_is_given_up(tmp_path):
    fault = """
        if update == 2 and RANK == "1":
            os._exit(9)
    """
    code, err = finish(train(tmp_path, "--restarts=10", fault=fault))
    assert code == 9
    ends = [line for line in err.splitlines() if line.startswith("launch: process")]
    assert len(ends) == 4
    assert ends[-1].endswith("3 restarts without a new checkpoint: the cause has to be fixed")
    assert re.findall(r"restart \d of 10 in (\d s)", err) == ["1 s", "2 s", "4 s"]


def test_a_process_that_holds_the_interpreter_is_named(tmp_path, expected):
    fault = """
        if update == 5 and RANK == "1" and once("held"):
            ctypes.PyDLL(None).sleep(1000)
    """
    code, err = finish(train(tmp_path, "--restarts=1", "--hang-timeout=3", fault=fault))
    assert code == 0, err
    assert re.search(r"error: process 1 hangs at update \d: no progress for .*callbacks", err)
    assert re.search(r"  process 1 at update \d: fault.py:\d+ in on_log ← callbacks.py", err)
    (kept,) = (tmp_path / "outputs").rglob("stacks-*")
    assert {file.name for file in kept.iterdir()} == {"process-0.txt", "process-1.txt"}
    assert losses(tmp_path) == expected


def test_a_stopped_process_is_named(tmp_path, expected):
    fault = """
        if update == 5 and RANK == "0" and once("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    started = time.monotonic()
    code, err = finish(train(tmp_path, "--restarts=1", fault=fault))
    assert code == 0, err
    assert re.search(r"error: process 0 hangs at update \d: stopped by a signal \(SIGSTOP\)", err)
    assert time.monotonic() - started < LIMIT_SECONDS
    assert losses(tmp_path) == expected


def test_a_slow_process_is_named_and_goes_on(tmp_path):
    fault = """
        time.sleep(0.3 if RANK == "1" else 0.02)
    """
    code, err = finish(train(tmp_path, fault=fault, steps=40))
    assert code == 0, err
    named = re.findall(
        r"launch: process (\d) is slow: (.*) takes .* ms per update, (\S+) times", err
    )
    assert named
    assert {(rank, what) for rank, what, _ in named} == {("1", "its own work")}
    assert 5 < float(named[0][2]) < 20


def test_a_long_compilation_is_no_hang(tmp_path):
    more = """
        def __init__(self):
            time.sleep(5)  # As a model whose tracing takes long.

        def on_start(self, update):
            time.sleep(5)  # As kernels that are tuned in the first update.
    """
    code, err = finish(train(tmp_path, "--hang-timeout=1", more=more, steps=4))
    assert code == 0, err
    assert "hangs" not in err


def test_a_request_to_stop_is_no_failure(tmp_path):
    fault = "time.sleep(0.2)"
    launcher = train(tmp_path, "--restarts=3", fault=fault, steps=1000)
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if re.search(r"train +3/", line):
            break
    launcher.send_signal(signal.SIGTERM)
    code, err = finish(launcher)
    assert code == 75, err
    assert "restart" not in err
    assert max(losses(tmp_path)) < 100
