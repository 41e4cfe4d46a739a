"""Attempts: what does not start again, heartbeats, goodput, and processes that are slow."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.beating import LIMIT_SECONDS, launch_beating

from meshwright.launch import watch
from meshwright.launch.restarts import newest_checkpoint
from meshwright.launch.watch import Stragglers
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.heartbeat import Beat, Doing, Heartbeat, read_beat


@pytest.mark.parametrize("code", [2, 75])
def test_what_is_no_failure_is_not_tried_again(tmp_path, code):
    found, err = launch_beating(tmp_path, f"sys.exit({code})", "--restarts=3")
    assert found == code
    assert "restart" not in err


def test_a_request_during_the_wait_ends_the_launch(tmp_path):
    (tmp_path / "work.py").write_text("import sys; sys.exit(9)")
    command = [sys.executable, "-m", "meshwright.launch", "--nprocs=1", "--restarts=9", "work.py"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if "restart 1 of 9" in line:
            break
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=LIMIT_SECONDS)
    assert launcher.returncode == 75
    assert "stopped before the restart" in err


def test_a_heartbeat_is_read_as_it_was_written(tmp_path):
    assert read_beat(tmp_path / "0.beat") is None
    heartbeat = Heartbeat(tmp_path / "0.beat")
    assert read_beat(tmp_path / "0.beat").first == -1
    heartbeat.begin()
    heartbeat.start_from(3)
    heartbeat.mark(Doing.DISPATCHING, 4)
    with heartbeat.during(Doing.SAVING):
        heartbeat.saved(4)
        assert read_beat(tmp_path / "0.beat").doing is Doing.SAVING
    beat = read_beat(tmp_path / "0.beat")
    assert (beat.count, beat.doing, beat.step) == (5, Doing.DISPATCHING, 4)
    assert (beat.first, beat.saved) == (3, 4)
    assert 0 < beat.useful < sum(beat.seconds)


def test_goodput_is_the_share_of_kept_steps():
    assert EarlierAttempts().goodput(useful=3.0, seconds=4.0) == 0.75
    earlier = EarlierAttempts(count=1, started=0.0, useful=100.0, run_dir="/runs/a")
    again = EarlierAttempts.from_environment(earlier.to_environment())
    assert again == earlier
    assert 0 < again.goodput(useful=100.0, seconds=1.0) < 1e-6


def test_the_newest_complete_checkpoint_counts(tmp_path):
    assert newest_checkpoint(None) is newest_checkpoint(tmp_path) is None
    for name in ("5", "20", "40.orbax-checkpoint-tmp-1", "30.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 20


def test_a_process_that_holds_the_interpreter_while_it_saves_is_named(monkeypatch):
    clock = iter(range(10_000))
    looks = iter(range(10_000))

    def read(file):
        # Both wait for the same save, and only one has threads that run.
        alive = next(looks) if file.name == "0" else 7
        return Beat(9, Doing.SAVING, 6, 0, alive=1 + alive)

    monkeypatch.setattr(watch, "read_beat", read)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    looking = watch.Watch({0: Path("0"), 1: Path("1")}, hang_seconds=3.0)
    found = [looking.look({0: 1, 1: 1}, force=True) for _ in range(100)]
    at = next(number for number, stuck in enumerate(found) if stuck is not None)
    assert at == 60
    assert str(found[at]) == (
        "process 1 hangs at step 6: it has held the interpreter's lock for 1m00s while saving"
    )


def beat_at(step: int, own: float, waited: float) -> Beat:
    """Return the beat of a process whose steps take 0.2 s, by what it does in them."""
    seconds = [0.0] * len(Doing)
    seconds[Doing.TRAINING], seconds[Doing.INPUT] = own * step, waited * step
    seconds[Doing.WAITING] = (0.2 - own - waited) * step
    return Beat(step, Doing.TRAINING, step, 0, -1, 0.0, 0.2 * step, tuple(seconds))


def test_stragglers_are_named_by_what_takes_them_long():
    own, waits = {0: 0.01, 1: 0.15, 2: 0.012}, {0: 0.02, 1: 0.021, 2: 0.1}
    stragglers = Stragglers()
    for step in range(120):
        stragglers.add({rank: beat_at(step, own[rank], waits[rank]) for rank in own})
    first, second = (str(each) for each in stragglers.take()[:2])
    assert "process 1 is slow: its own work takes 150.0 ms per step, 13.6 times" in first
    assert "process 2 is slow: waiting for input takes 100.0 ms per step, 4.9 times" in second
    assert not stragglers.take()


def test_equal_processes_are_no_stragglers():
    stragglers = Stragglers()
    for step in range(200):
        # The second takes twice as long for what is no part of a step worth mentioning.
        stragglers.add({0: beat_at(step, 0.001, 0.0), 1: beat_at(step, 0.002, 0.0)})
    assert not stragglers.take()
