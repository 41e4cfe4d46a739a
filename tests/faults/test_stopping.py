"""Rows 6 and 7: SIGTERM to one process, and Ctrl-C to the launcher, once and twice."""

import os
import re
import signal
import time

import pytest
from faults.harness import checkpoints, events, launch

pytestmark = [pytest.mark.full, pytest.mark.faults]

SLOWLY = "time.sleep(0.1)"
"""Leaves time for a signal between two steps."""
UNTIL = 14


def go_on(folder, undisturbed):
    """Run the same command to its end, and compare."""
    again = launch(folder, steps=UNTIL, code=SLOWLY).finish()
    assert again.code == 0, again.err
    undisturbed(steps=UNTIL).check_same(again)
    return again


def test_sigterm_to_one_process_stops_all_after_the_same_step(tmp_path, undisturbed):
    stopped = launch(tmp_path, "--restarts=3", steps=UNTIL, code=SLOWLY, fault="preempt", at=4)
    stopped.wait_for(r"train +4/")
    sent = time.monotonic()
    stopped.finish()
    assert time.monotonic() - sent < 30
    assert stopped.code == 75, stopped.err
    assert "restart 1" not in stopped.err
    last = r"launch: process \d ended with exit code 75 at step \d+; step (\d+) is saved, and "
    assert re.match(last, stopped.lines[-1][1]), stopped.err
    (stop,) = [event for event in events(stopped.run) if event["kind"] == "stop"]
    assert stop["message"] == "SIGTERM asked to stop"
    assert max(checkpoints(stopped.run)) == stop["step"] < UNTIL
    again = go_on(tmp_path, undisturbed)
    assert f"continuing after step {stop['step']}," in again.err


def test_a_second_sigterm_to_one_process_ends_it_at_once(tmp_path):
    code = """
        if step == 5 and RANK == 1:
            time.sleep(1)  # The checkpoint of step 3 gets written.
            print("READY", file=sys.stderr)
            time.sleep(600)
    """
    stopped = launch(tmp_path, code=code)
    stopped.wait_for("READY")
    worker = stopped.workers()[1]
    os.kill(worker, signal.SIGTERM)
    stopped.wait_for(r"a second signal stops at once")
    sent = time.monotonic()
    os.kill(worker, signal.SIGTERM)
    stopped.finish()
    assert time.monotonic() - sent < 30
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    assert "process 1 ended with exit code 143" in stopped.err
    assert 3 in checkpoints(stopped.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_one_request_to_the_launcher_saves_and_the_same_command_goes_on(
    tmp_path, undisturbed, number
):
    stopped = launch(tmp_path, "--restarts=3", steps=UNTIL, code=SLOWLY)
    stopped.wait_for(r"train +4/")
    stopped.process.send_signal(number)
    stopped.finish()
    assert stopped.code == 75, stopped.err
    assert "restart 1" not in stopped.err
    go_on(tmp_path, undisturbed)


def test_ctrl_c_twice_ends_at_once(tmp_path):
    code = """
        if step == 5:
            time.sleep(1)  # The checkpoint of step 3 gets written.
            print("READY", RANK, file=sys.stderr)
            time.sleep(600)
    """
    stopped = launch(tmp_path, code=code)
    stopped.wait_for("READY 0")
    stopped.wait_for("READY 1")
    stopped.process.send_signal(signal.SIGINT)
    stopped.wait_for(r"a second signal stops at once")
    sent = time.monotonic()
    stopped.process.send_signal(signal.SIGINT)
    stopped.finish()
    assert time.monotonic() - sent < 10
    assert stopped.code == 128 + signal.SIGKILL
    assert 3 in checkpoints(stopped.run)
