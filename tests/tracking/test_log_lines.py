"""Plain lines: what they say, how they line up, and the time that is left."""

import re
import time

import pytest

from meshwright.tracking.log_lines import (
    LineTracker,
    LogFile,
    Pace,
    human_bytes,
    human_count,
    human_seconds,
)

pytestmark = pytest.mark.quick

FACTS = {
    "plan": "fsdp=4 × tensor=2, batch 16",
    "devices": {"count": 8, "kind": "cpu", "processes": 2},
    "parameters": {"count": 3_456_789, "bytes": 13_827_156},
    "memory_per_device": {"parameters": 2**20, "optimizer": 2**21, "temporary": None},
}
VALUES = {
    "accuracy": 0.25,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "samples_per_second": 412.3,
    "tokens_per_second": 52_700.0,
    "step_seconds": 0.0831,
    "mfu": 0.4123,
    "memory_bytes": 1.5 * 2**30,
    "input_wait_share": 0.01,
}


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def told(tmp_path, clock):
    written = []
    tracker = LineTracker(written.append, tmp_path, total_steps=500, clock=clock)
    return tracker, written


def test_the_start_says_what_is_trained_and_where_it_goes(told, tmp_path):
    tracker, written = told
    tracker.start(FACTS)
    assert written == [
        "plan        fsdp=4 × tensor=2, batch 16",
        "devices     8 × cpu in 2 processes",
        "parameters  3.46M (3,456,789), 13.8 MB",
        "memory      3.1 MB per device: parameters 1.0 MB, optimizer 2.1 MB",
        f"output      {tmp_path}",
    ]


def test_a_line_has_the_known_metrics_first_and_the_time_left_last(told, clock):
    tracker, written = told
    tracker.log("train", 1, VALUES)
    clock.now += 10.0
    tracker.log("train", 101, VALUES)
    assert re.sub(" +", " ", written[1]) == (
        "train 101/500 loss 2.5000 lr 3.00e-04 412 samples/s 52.7k tokens/s 83.1 ms/step "
        "MFU 41.2% 1.6 GB accuracy 0.25 ETA 39.9 s"
    )
    assert "ETA" not in written[0]
    assert written[0].index("accuracy") == written[1].index("accuracy")


def test_events_are_lines_except_those_that_metrics_tell_of(told):
    tracker, written = told
    tracker.event("checkpoint", 50, "saved [50]", {})
    tracker.event("eval", 50, "evaluated", {})
    assert written == ["checkpoint: saved [50] (step 50)"]


def test_the_log_file_goes_on_where_it_ended(tmp_path):
    for step in (1, 2):
        tracker = LogFile(tmp_path, total_steps=None)
        tracker.log("train", step, {"loss": 1.0})
        tracker.close({})
    written = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split()[2:4] for line in written] == [["train", "1"], ["train", "2"]]


def test_the_time_left_does_not_count_what_came_before_the_first_line(clock):
    pace = Pace(11, clock)
    clock.now += 60.0  # the compilation
    assert pace.seconds_left(1) is None
    clock.now += 5.0
    assert pace.seconds_left(6) == pytest.approx(5.0)
    assert pace.seconds_left(11) is None
    assert Pace(None, clock).seconds_left(5) is None


def test_steps_beyond_the_end_have_no_share():
    """As where a trained model is only evaluated, with steps=0."""
    assert [Pace(total, time.monotonic).count(7).strip() for total in (20, 0)] == ["7/20", "7"]


@pytest.mark.parametrize(
    ("say", "value", "text"),
    [
        (human_bytes, 999, "999 B"),
        (human_bytes, 1500, "1.5 kB"),
        (human_bytes, 3e12, "3.0 TB"),
        (human_count, 999, "999"),
        (human_count, 52_700, "52.7k"),
        (human_count, 999_999, "1M"),
        (human_count, 2.5e12, "2.5T"),
        (human_seconds, 0.083, "83 ms"),
        (human_seconds, 59.5, "59.5 s"),
        (human_seconds, 192, "3m12s"),
        (human_seconds, 7260, "2h01m"),
        (human_seconds, 3 * 86400 + 3600, "3d01h"),
    ],
)
def test_numbers_are_said_with_units(say, value, text):
    assert say(value) == text
