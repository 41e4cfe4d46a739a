"""Rows 9 to 12: processes that are stopped, hold the interpreter, are slow, or compile for long."""

import re

import pytest
from faults.harness import launch

pytestmark = [pytest.mark.full, pytest.mark.faults]


def test_sigstop_of_a_worker_is_detected_and_named(tmp_path, undisturbed):
    done = launch(tmp_path, "--restarts=1", fault="sigstop").finish()
    assert done.code == 0, done.err
    pattern = r"error: process 1 hangs at step \d: stopped by a signal \(SIGSTOP\); all processes"
    assert re.match(pattern, done.first_error), done.err
    # The other process waits for it; its stack says where.
    assert re.search(r"  process 0 at step \d: \w+\.py:\d+ in \w+ ←", done.err)
    assert re.search(r"  process 1 at step \d: stopped by a signal", done.err)
    (kept,) = done.run.glob("stacks-*")
    assert "process-0.txt" in {file.name for file in kept.iterdir()}
    undisturbed().check_same(done)


def test_a_worker_that_holds_the_gil_is_caught_from_outside(tmp_path, undisturbed):
    done = launch(tmp_path, "--restarts=1", "--hang-timeout=3", fault="gil").finish()
    assert done.code == 0, done.err
    pattern = r"error: process 1 hangs at step \d: no progress for .*callbacks; all processes are"
    assert re.match(pattern, done.first_error), done.err
    assert re.search(
        r"  process 1 at step \d: fault_makers.py:\d+ in _hold_interpreter ←", done.err
    )
    (kept,) = done.run.glob("stacks-*")
    assert {file.name for file in kept.iterdir()} == {"process-0.txt", "process-1.txt"}
    undisturbed().check_same(done)


def test_a_hanging_run_without_restarts_ends(tmp_path):
    code = """
        if step == 5 and RANK == 0:
            time.sleep(1000)
    """
    done = launch(tmp_path, "--hang-timeout=3", code=code).finish()
    assert done.code == 1, done.err
    assert re.match(r"error: process 0 hangs at step \d: no progress for .*", done.first_error)
    assert done.first_error.endswith("--restarts N restarts all processes")


@pytest.mark.parametrize(
    ("what", "own", "code"),
    [
        ("its own work", "", "time.sleep(0.3 if RANK == 1 else 0.02)"),
        (
            "waiting for input",
            """
            fast = data
            def data(step, batch_size):
                time.sleep(0.3 if RANK == 1 and step else 0.02)
                return fast(step, batch_size)
            """,
            "",
        ),
    ],
    ids=["compute", "input"],
)
def test_a_slow_worker_is_named_with_its_ratio_and_goes_on(tmp_path, what, own, code):
    words = ("data.prefetch=1",) if own else ()
    done = launch(tmp_path, own=own, code=code, words=words, steps=40).finish()
    assert done.code == 0, done.err
    pattern = r"launch: process (\d) is slow: (.*) takes .* ms per step, (?:over )?(\S+) times"
    named = re.findall(pattern, done.err)
    assert {(rank, kind) for rank, kind, _ in named} == {("1", what)}, done.err
    assert float(named[0][2]) > 3


def test_a_long_first_compilation_is_no_hang(tmp_path, undisturbed):
    own = """
        class Slow(mw.Callback):
            def __init__(self):
                time.sleep(5)  # As a model whose tracing takes long.

            def on_start(self, step):
                time.sleep(5)  # As kernels that are tuned in the first step.
    """
    words = ("training.callbacks=[own:Slow]",)
    done = launch(tmp_path, "--hang-timeout=1", own=own, words=words).finish()
    assert done.code == 0, done.err
    assert "hangs" not in done.err
    undisturbed().check_same(done)
