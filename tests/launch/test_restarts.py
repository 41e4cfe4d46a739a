"""Attempts: what starts again, what does not, and who is named when a process makes no progress."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest

from meshwright.attempts import EarlierAttempts
from meshwright.heartbeat import Beat, Doing, Heartbeat, read_beat
from meshwright.launch.restarts import newest_checkpoint
from meshwright.launch.stragglers import Stragglers

LIMIT_SECONDS = 60
LOOP = """
import ctypes, os, signal, sys, time
from pathlib import Path
from meshwright.attempts import EarlierAttempts
from meshwright.heartbeat import Doing, own_heartbeat

rank, earlier = os.environ["RANK"], EarlierAttempts.from_environment()
attempt = earlier.count + 1
beat = own_heartbeat()
beat.begin()
beat.tell_folder(Path.cwd())
beat.start_from(0)

def update(number, seconds=0.01):
    beat.mark(Doing.TRAINING, number)
    time.sleep(seconds)

def commit(number):
    beat.saved(number)
    Path(f"checkpoints/{number}").mkdir(parents=True, exist_ok=True)
"""


def launch(folder, script: str, *flags: str) -> tuple[int, str]:
    """Launch two processes that beat as a training loop does."""
    (folder / "work.py").write_text(LOOP + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.launch", "--nprocs=2", *flags, "work.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=folder,
    )
    return done.returncode, done.stderr


def test_a_killed_process_starts_again_and_knows_the_folder(tmp_path):
    script = """
        update(7)
        if rank == "0":
            commit(6)
        if attempt == 1:
            time.sleep(0.5)
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        print(attempt, earlier.run_dir, os.environ["MASTER_PORT"], file=sys.stderr)
    """
    code, err = launch(tmp_path, script, "--restarts=2")
    assert code == 0, err
    lines = err.splitlines()
    killed = "process 1 was killed by SIGKILL at update 7"
    assert lines[0] == f"error: {killed}; all processes are started again"
    restart = f"launch: {killed}; restart 1 of 2 in 1 s, from the checkpoint of update 6"
    assert restart in lines
    assert len(re.findall(rf"\] 2 {re.escape(str(tmp_path))} \d+", err)) == 2
    assert re.match(r"launch: goodput \d+%: \S+ \S+ of \S+ \S+ were updates", lines[-1])


def test_a_process_that_hangs_is_named_with_the_stacks_of_all(tmp_path):
    script = """
        def hold_the_interpreter():
            ctypes.PyDLL(None).sleep(600)
        for number in range(5):
            update(number)
        if rank == "1":
            hold_the_interpreter()
        beat.mark(Doing.WAITING)
        time.sleep(600)
    """
    code, err = launch(tmp_path, script, "--hang-timeout=1")
    assert code == 1, err
    lines = err.splitlines()
    assert re.match(
        r"error: process 1 hangs at update 4: no progress for 1\S* s while training; --restarts N",
        lines[0],
    )
    assert re.match(r"  process 0 at update 4: work.py:\d+ in <module>", lines[1])
    assert re.match(r"  process 1 at update 4: work.py:\d+ in hold_the_interpreter ←", lines[2])
    (folder,) = tmp_path.glob("stacks-*")
    assert "in hold_the_interpreter" in (folder / "process-1.txt").read_text()


@pytest.mark.full
@pytest.mark.faults
def test_a_stopped_process_is_named(tmp_path):
    script = """
        update(4)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """
    code, err = launch(tmp_path, script)
    assert code == 1
    assert err.startswith("error: process 1 hangs at update 4: stopped by a signal (SIGSTOP); ")
    assert "  process 1 at update 4: stopped by a signal" in err


@pytest.mark.full
@pytest.mark.faults
def test_a_crash_loop_ends_after_three_restarts_without_progress(tmp_path):
    script = """
        if rank == "0" and attempt == 2:
            commit(3)
            time.sleep(0.5)
        sys.exit(9 if rank == "0" else 0)
    """
    code, err = launch(tmp_path, script, "--restarts=100")
    assert code == 9
    assert re.findall(r"in (\d+ s), (\w+ \w+ \w+)", err) == [
        ("1 s", "from the beginning"),
        *[(f"{seconds} s", "from the checkpoint") for seconds in (1, 2, 4)],
    ]
    assert (
        "3 restarts without a new checkpoint: the cause has to be fixed; update 3 is saved" in err
    )


@pytest.mark.parametrize("code", [2, 75])
def test_what_is_no_failure_is_not_tried_again(tmp_path, code):
    found, err = launch(tmp_path, f"sys.exit({code})", "--restarts=3")
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
    assert (beat.count, beat.doing, beat.update) == (5, Doing.DISPATCHING, 4)
    assert (beat.first, beat.saved) == (3, 4)
    assert 0 < beat.useful < sum(beat.seconds)


def test_goodput_is_the_share_of_kept_updates():
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


def beat_at(update: int, own: float, waited: float) -> Beat:
    """Return the beat of a process whose updates take 0.2 s, by what it does in them."""
    seconds = [0.0] * len(Doing)
    seconds[Doing.TRAINING], seconds[Doing.INPUT] = own * update, waited * update
    seconds[Doing.WAITING] = (0.2 - own - waited) * update
    return Beat(update, Doing.TRAINING, update, 0, -1, 0.0, 0.2 * update, tuple(seconds))


def test_stragglers_are_named_by_what_takes_them_long():
    own, waits = {0: 0.01, 1: 0.15, 2: 0.012}, {0: 0.02, 1: 0.021, 2: 0.1}
    stragglers = Stragglers()
    for update in range(120):
        stragglers.add({rank: beat_at(update, own[rank], waits[rank]) for rank in own})
    first, second = (str(each) for each in stragglers.take()[:2])
    assert "process 1 is slow: its own work takes 150.0 ms per update, 13.6 times" in first
    assert "process 2 is slow: waiting for input takes 100.0 ms per update, 4.9 times" in second
    assert not stragglers.take()


def test_equal_processes_are_no_stragglers():
    stragglers = Stragglers()
    for update in range(200):
        # The second takes twice as long for what is no part of an update worth mentioning.
        stragglers.add({0: beat_at(update, 0.001, 0.0), 1: beat_at(update, 0.002, 0.0)})
    assert not stragglers.take()
