"""Rows 1, 9, 10 and 22 without JAX: what the launcher does about processes that beat."""

import re

import pytest
from faults.beating import launch_beating


def test_sigkill_of_one_worker_starts_all_again_in_the_same_folder(tmp_path):
    script = """
        step(7)
        if rank == "0":
            commit(6)
        if attempt == 1:
            time.sleep(0.5)
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        print(attempt, earlier.run_dir, os.environ["MASTER_PORT"], file=sys.stderr)
    """
    code, err = launch_beating(tmp_path, script, "--restarts=2")
    assert code == 0, err
    lines = err.splitlines()
    killed = "process 1 was killed by SIGKILL at step 7"
    assert lines[0] == f"error: {killed}; all processes are restarted"
    restart = f"launch: {killed}; restart 1 of 2 in 1 s, from the checkpoint of step 6"
    assert restart in lines
    assert len(re.findall(rf"\] 2 {re.escape(str(tmp_path))} \d+", err)) == 2
    assert re.match(r"launch: goodput \d+%: \S+ \S+ of \S+ \S+ were steps", lines[-1])


def test_a_worker_that_holds_the_gil_is_named_with_the_stacks_of_all(tmp_path):
    script = """
        def hold_the_interpreter():
            ctypes.PyDLL(None).sleep(600)
        for number in range(5):
            step(number)
        if rank == "1":
            hold_the_interpreter()
        beat.mark(Doing.WAITING)
        time.sleep(600)
    """
    code, err = launch_beating(tmp_path, script, "--hang-timeout=1")
    assert code == 1, err
    lines = err.splitlines()
    assert re.match(
        r"error: process 1 hangs at step 4: no progress for 1\S* s while training; --restarts N",
        lines[0],
    )
    assert re.match(r"  process 0 at step 4: work.py:\d+ in <module>", lines[1])
    assert re.match(r"  process 1 at step 4: work.py:\d+ in hold_the_interpreter ←", lines[2])
    (folder,) = tmp_path.glob("stacks-*")
    assert "in hold_the_interpreter" in (folder / "process-1.txt").read_text()


@pytest.mark.full
@pytest.mark.faults
def test_sigstop_of_a_worker_is_named(tmp_path):
    script = """
        step(4)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """
    code, err = launch_beating(tmp_path, script)
    assert code == 1
    assert err.startswith("error: process 1 hangs at step 4: stopped by a signal (SIGSTOP); ")
    assert "  process 1 at step 4: stopped by a signal" in err


@pytest.mark.full
@pytest.mark.faults
def test_a_crash_at_every_restart_ends_after_three_without_a_checkpoint(tmp_path):
    script = """
        if rank == "0" and attempt == 2:
            commit(3)
            time.sleep(0.5)
        sys.exit(9 if rank == "0" else 0)
    """
    code, err = launch_beating(tmp_path, script, "--restarts=100")
    assert code == 9
    assert re.findall(r"in (\d+ s), (\w+ \w+ \w+)", err) == [
        ("1 s", "from the beginning"),
        *[(f"{seconds} s", "from the checkpoint") for seconds in (1, 2, 4)],
    ]
    assert "3 restarts without a new checkpoint: the cause has to be fixed; step 3 is saved" in err
