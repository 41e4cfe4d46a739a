"""Processes start together and end together, whoever ends first and however."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LIMIT_SECONDS = 60


@pytest.fixture
def started(tmp_path):
    """Start a launch of a script; whatever is left of it is killed after the test."""
    running: list[subprocess.Popen[str]] = []
    # Children of a shell's background job would inherit that Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(script: str, *flags: str, count: int = 2) -> subprocess.Popen[str]:
        file = tmp_path / "work.py"
        file.write_text("import os, signal, subprocess, sys, time\nrank = os.environ['RANK']\n")
        with file.open("a") as out:
            out.write(textwrap.dedent(script))
        command = [sys.executable, "-m", "meshwright.launch", f"--nprocs={count}", *flags]
        process = subprocess.Popen(
            [*command, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        running.append(process)
        return process

    yield start
    signal.signal(signal.SIGINT, before)
    for process in running:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, err


def wait_for(*files: Path) -> list[int]:
    """Return the process ids that files hold, once all are written."""
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        if all(file.exists() and file.read_text().endswith("\n") for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.02)
    raise TimeoutError(f"not written: {files}")


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"still there: {alive}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        # One that nobody has waited for yet still has a number, and is not alive.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_of_process_0_stay_on_stdout_and_the_rest_is_named(started):
    script = """
        print("out", rank, sys.argv[1:])
        print("err", rank, file=sys.stderr)
    """
    code, out, err = finish(started(script))
    assert code == 0
    assert out == "out 0 []\n"
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1", "[1] out 1 []"]


def test_all_end_when_one_fails_and_its_exit_code_counts(started):
    script = """
        if rank == "1":
            from meshwright.runtime.heartbeat import own_heartbeat
            own_heartbeat().start_from(20)
            own_heartbeat().report(error="the disk is full")
            sys.exit(7)
        time.sleep(600)
    """
    code, _, err = finish(started(script, count=3))
    assert code == 7
    last = "launch: process 1 ended with exit code 7 at step 20: the disk is full"
    assert err.splitlines()[-1] == last
    assert "process 1 ended with exit code 7; the other 2 are being terminated" in err


def test_a_process_that_ends_after_the_one_that_lost_it_is_the_cause(started):
    script = """
        from meshwright.runtime.heartbeat import own_heartbeat
        if rank == "1":
            own_heartbeat().report(error="process 1 lost process 0", lost_peer=True)
            print("error: process 1 lost process 0", file=sys.stderr)
            sys.exit(1)
        time.sleep(0.2)
        own_heartbeat().report(error="the batch is too large")
        print("error: the batch is too large", file=sys.stderr)
        sys.exit(2)
    """
    code, _, err = finish(started(script))
    assert code == 2
    assert err.splitlines() == [
        "[0] error: the batch is too large",
        "[1] error: process 1 lost process 0",
        "launch: process 0 ended with exit code 2: the batch is too large",
    ]


def test_a_process_that_ignores_the_request_is_killed_after_the_grace(started):
    script = """
        if rank == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    code, _, err = finish(started(script, "--grace", "0.3"))
    assert code == 128 + signal.SIGKILL
    assert "error: process 1 was killed by SIGKILL" in err


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM, signal.SIGUSR1]
)
def test_a_request_to_the_launcher_reaches_every_process(started, tmp_path, number):
    script = """
        def stop(number, frame):
            print("stopping", rank, file=sys.stderr)
            sys.exit(75)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, stop)
        open(rank, "w").write(f"{os.getpid()}\\n")
        time.sleep(600)
    """
    launcher = started(script)
    pids = wait_for(tmp_path / "0", tmp_path / "1")
    launcher.send_signal(number)
    code, _, err = finish(launcher)
    assert code == 75
    assert {"[0] stopping 0", "[1] stopping 1"} <= set(err.splitlines())
    wait_until_gone(pids)


def test_a_second_request_is_an_order(started, tmp_path):
    script = """
        def heard(number, frame):
            open("heard" + rank, "w").write("1\\n")
        signal.signal(signal.SIGINT, heard)
        open(rank, "w").write(f"{os.getpid()}\\n")
        while True:
            time.sleep(1)
    """
    launcher = started(script)
    wait_for(tmp_path / "0", tmp_path / "1")
    launcher.send_signal(signal.SIGINT)
    wait_for(tmp_path / "heard0", tmp_path / "heard1")
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 128 + signal.SIGKILL


CHILDREN = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("child" + rank, "w").write(f"{child.pid}\\n")
    open(rank, "w").write(f"{os.getpid()}\\n")
"""


def test_nothing_stays_behind_when_the_launcher_is_killed(started, tmp_path):
    launcher = started(CHILDREN + "    time.sleep(600)\n")
    names = ("0", "1", "child0", "child1")
    pids = wait_for(*(tmp_path / name for name in names))
    assert all(map(is_alive, pids))
    environ = Path(f"/proc/{pids[0]}/environ").read_bytes().decode().split("\0")
    (heartbeat,) = (text.partition("=")[2] for text in environ if "MESHWRIGHT_HEARTBEAT" in text)
    assert Path(heartbeat).parent.is_dir()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until_gone(pids)
    assert not Path(heartbeat).parent.exists()


def test_nothing_stays_behind_a_clean_end(started, tmp_path):
    code, _, _ = finish(started(CHILDREN))
    assert code == 0
    wait_until_gone(wait_for(tmp_path / "child0", tmp_path / "child1"))
