"""A run folder belongs to one run at a time, on this host and on others."""

import errno
import json
import os
import socket
import subprocess
import sys

import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.errors import UserError
from meshwright.trainer import run_dir
from meshwright.trainer.run_dir import RunLock, refuse_locked

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

HOLDER = """
import sys
from pathlib import Path
from meshwright.trainer.run_dir import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has locked the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def fit(folder, steps=1, **settings):
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.01),
        log_every=1,
    )
    data = [{"x": np.ones((8, 4), np.float32)}] * steps
    return trainer.fit(data, steps=steps, run_dir=folder, progress=False, **settings)


def write_lock(folder, **changes):
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": "", "since": "yesterday"}
    (folder / "run.lock").write_text(json.dumps(own | changes))


def test_a_second_run_in_the_folder_is_refused_and_writes_nothing(other, tmp_path):
    with pytest.raises(UserError, match="another run is using") as caught:
        fit(tmp_path)
    assert f"process {other.pid} on {socket.gethostname()} has been writing to it" in (
        caught.value.why
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    # The lock is gone when the other process has ended, in whatever way.
    other.communicate("")
    assert not (tmp_path / "run.lock").exists()
    assert fit(tmp_path).steps == 1


@pytest.mark.full
def test_the_lock_of_a_killed_process_is_replaced(other, tmp_path):
    other.kill()
    other.wait()
    assert (tmp_path / "run.lock").exists()
    assert fit(tmp_path).steps == 1
    assert not (tmp_path / "run.lock").exists()


def test_a_number_that_now_belongs_to_another_process_is_no_lock(tmp_path):
    write_lock(tmp_path, started="long ago")
    refuse_locked(tmp_path)
    assert fit(tmp_path).steps == 1


def test_the_lock_of_another_host_is_refused_with_what_to_remove(tmp_path):
    write_lock(tmp_path, host="elsewhere", pid=7)
    with pytest.raises(UserError, match="another run is using") as caught:
        fit(tmp_path)
    assert "process 7 on elsewhere" in caught.value.why
    assert f"remove {tmp_path / 'run.lock'}" in caught.value.fix


def test_a_requeued_job_replaces_its_own_lock_of_another_host(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for job, restart in (("big 11", 0), ("small 12", 0), ("big 12", 1)):
        write_lock(tmp_path, host="elsewhere", pid=7, job=job, restart=restart)
        with pytest.raises(UserError, match="process 7 on elsewhere"):
            RunLock(tmp_path).acquire()
    write_lock(tmp_path, host="elsewhere", pid=7, job="big 12", restart=0)
    lock = RunLock(tmp_path)
    lock.acquire()
    held = json.loads((tmp_path / "run.lock").read_text())
    assert (held["pid"], held["job"], held["restart"]) == (os.getpid(), "big 12", 1)
    lock.release()
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", "null"])
def test_a_lock_without_content_is_refused_while_it_is_new_and_replaced_later(
    tmp_path, content, caplog, monkeypatch
):
    monkeypatch.setattr(run_dir, "_WRITING_SECONDS", 0.001)
    (tmp_path / "run.lock").write_text(content)
    with pytest.raises(UserError, match="another run is using") as caught:
        RunLock(tmp_path).acquire()
    assert "run.lock says nothing about it, or cannot be read" in caught.value.why
    os.utime(tmp_path / "run.lock", (0, 0))
    lock = RunLock(tmp_path)
    lock.acquire()
    assert "says nothing about its process, which ended" in caplog.text
    lock.release()


def test_a_disk_that_is_full_at_the_first_byte_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir, "_this_process", full)
    with pytest.raises(UserError, match="cannot write the output directory") as caught:
        RunLock(tmp_path).acquire()
    assert "No space left on device" in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_a_run_inside_of_a_run_is_refused_and_the_lock_is_released_after_a_failure(tmp_path):
    class Nested(mw.Callback):
        def on_log(self, step, values):
            fit(tmp_path)

    with pytest.raises(UserError, match="another run is using"):
        fit(tmp_path, callbacks=[Nested()])
    assert not (tmp_path / "run.lock").exists()


def test_checkpoints_that_another_run_saved_meanwhile_are_not_overwritten(tmp_path, monkeypatch):
    from meshwright.trainer import training_run

    original = training_run.RunLock.acquire

    def acquire_late(self):
        # Another run has come and gone between the look for checkpoints and the lock.
        (tmp_path / "checkpoints/3").mkdir(parents=True, exist_ok=True)
        original(self)

    monkeypatch.setattr(training_run.RunLock, "acquire", acquire_late)
    with pytest.raises(UserError, match="another run has saved checkpoints in") as caught:
        fit(tmp_path)
    assert caught.value.why == "the newest is now step 3"
