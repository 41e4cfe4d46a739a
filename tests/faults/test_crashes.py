"""Rows 22 to 24: crashes at every restart, an exception in one process, and a tracker offline."""

import re

import pytest
from faults.harness import checkpoints, launch

pytestmark = [pytest.mark.full, pytest.mark.faults]


def test_a_crash_at_every_restart_ends_after_three_without_progress(tmp_path):
    code = """
        if step == 5 and RANK == 1:
            time.sleep(1)  # The checkpoint of step 3 gets written.
            os._exit(9)
    """
    done = launch(tmp_path, "--restarts=10", code=code).finish()
    assert done.code == 9, done.err
    ends = [line for _, line in done.lines if line.startswith("launch: process 1 ended with exit")]
    assert len(ends) == 4
    assert "at step " in ends[-1]
    assert "3 restarts without a new checkpoint: the cause has to be fixed; step 3" in ends[-1]
    assert re.findall(r"restart \d of 10 in (\d s)", done.err) == ["1 s", "2 s", "4 s"]
    assert checkpoints(done.run) == [3]


def test_an_exception_in_one_process_is_shown_once_and_first(tmp_path):
    done = launch(tmp_path, fault="exception").finish()
    assert done.code == 2, done.err
    raised = "error: your code raised RuntimeError: an exception that a drill raises"
    assert done.first_error == f"[1] {raised}"
    assert done.err.count(raised) == 1
    assert re.search(r'\[1\]   File ".*/raises.py", line \d+, in act', done.err)
    # What the other says about it comes afterwards.
    assert done.err.index(raised) < done.err.find("lost its connection") or (
        "lost its connection" not in done.err
    )
    last = r"launch: process 1 ended with exit code 2 at step \d: your code raised RuntimeError: "
    assert re.match(last, done.lines[-1][1])
    assert max(checkpoints(done.run)) == 3


OFFLINE = """
class Settings(dict):
    pass

def init(**arguments):
    raise ConnectionError("api.wandb.example cannot be reached")
"""


def test_a_tracker_that_is_offline_is_one_warning_and_training_goes_on(tmp_path, undisturbed):
    (tmp_path / "wandb.py").write_text(OFFLINE)
    done = launch(tmp_path, words=("tracking.wandb=true",)).finish()
    assert done.code == 0, done.err
    warnings = [line for _, line in done.lines if "api.wandb.example cannot be reached" in line]
    assert len(warnings) == 1
    assert "wandb" in warnings[0]
    undisturbed().check_same(done)
