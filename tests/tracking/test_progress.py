"""The bar of a terminal: what it shows, and that it leaves the terminal as it was."""

import io

import pytest
from rich.console import Console

from meshwright.tracking.progress import ProgressTracker

pytestmark = pytest.mark.quick


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)


def shown(tracker, screen):
    with screen.capture() as capture:
        screen.print(tracker.render())
    return capture.get()


def test_the_bar_shows_how_far_how_long_and_the_metrics(screen, tmp_path):
    now = iter([0.0, 0.0, *(10.0 for _ in range(20))])
    tracker = ProgressTracker(screen, tmp_path, total_steps=500, clock=lambda: next(now))
    assert "waiting for the first step" in shown(tracker, screen)
    tracker.log("train", 120, {"loss": 2.5, "learning_rate": 3e-4, "mfu": 0.4})
    text = shown(tracker, screen)
    assert "120/500  10 s" in text
    assert "loss 2.5000 · lr 3.00e-04 · MFU 40.0%" in text


def test_a_run_without_a_known_end_has_a_bar_too(screen, tmp_path):
    tracker = ProgressTracker(screen, tmp_path, total_steps=None)
    tracker.log("train", 7, {"loss": 1.0})
    assert "  7  " in shown(tracker, screen)


def test_the_cursor_comes_back_and_events_stay(screen, tmp_path):
    tracker = ProgressTracker(screen, tmp_path, total_steps=2)
    tracker.start({"plan": "data=8"})
    tracker.log("eval", 1, {"loss": 3.25})
    tracker.event("warning", 1, "slow [disk]", {})
    tracker.close({})
    tracker.close({})
    written = screen.file.getvalue()
    assert "data=8" in written
    assert "eval  1/2  loss 3.2500" in written
    assert "warning: slow [disk] (step 1)" in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
