"""Signals to `meshwright train` are honoured from the start: exit code 75, nothing lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

OWN = """
import ctypes, os, signal, sys, time
import numpy as np
from flax import nnx

WHERE = os.environ["WHERE"]

def wait(where):
    if where == WHERE:
        # As in the compiler: a call out of Python that no signal interrupts.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        print(f"READY", file=sys.stderr, flush=True)
        ctypes.CDLL(None).sleep(60)

wait("import")

class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
    def __call__(self, x):
        return self.layer(x)

def loss(model, batch):
    wait("trace")
    return (model(batch["x"]) ** 2).mean()

def data(step, batch_size):
    if step == 20 and WHERE in ("train", "data"):
        print(f"READY", file=sys.stderr, flush=True)
        time.sleep(60 * (WHERE == "data"))
    time.sleep(0.01 * (WHERE == "train"))
    return {"x": np.ones((batch_size, 4), "float32")}
"""

COMMAND = [
    *(sys.executable, "-m", "meshwright", "train", "simulate=1", "hydra.run.dir=run"),
    *("model.kind=own_signals:Net", "task.kind=own_signals:loss", "data.kind=own_signals:data"),
    *("optimizer.kind=sgd", "optimizer.schedule=constant", "training.steps=1000000"),
    "tracking.log_every=1000000",
]


@pytest.fixture
def started(tmp_path):
    """Start a training that says when it is ready for a signal."""
    (tmp_path / "own_signals.py").write_text(OWN)
    # Children of a shell's background job would inherit that Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = []

    def start(where: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            COMMAND,
            env={**os.environ, "WHERE": where},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        running.append(process)
        assert process.stderr is not None
        assert any("READY" in line for line in process.stderr)
        return process

    yield start
    signal.signal(signal.SIGINT, before)
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("trace", signal.SIGTERM),
        pytest.param("trace", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("import", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("import", signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_before_the_first_step_it_ends_at_once(started, tmp_path, where, number):
    process = started(where)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert time.monotonic() - sent < 5
    assert f"{number.name} before the first step: stopped, and nothing is lost" in err
    assert out == ""
    assert not (tmp_path / "run").exists()


# tests/trainer/starting has signals to a run in the process of the test, every day.
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_while_it_trains_it_saves_and_the_same_command_goes_on(started, tmp_path, number):
    process = started("train")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert f"{number.name} asked to stop" in out
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert 5 <= int(checkpoint.name) < 1000


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(started, number):
    process = started("data")
    process.send_signal(number)
    assert process.stderr is not None
    assert any("a second signal stops at once" in line for line in process.stderr)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 128 + number
