"""Several trackers told at once: a failing one is left out, and the others hear of it."""

import logging

import numpy as np
import pytest

from meshwright.tracking.tracker import Trackers

pytestmark = pytest.mark.quick


class Recorder:
    """Remembers what it was told."""

    def __init__(self):
        self.calls = []

    def start(self, facts):
        self.calls.append(("start", dict(facts)))

    def log(self, split, step, values):
        self.calls.append(("log", split, step, dict(values)))

    def event(self, kind, step, message, details):
        self.calls.append(("event", kind, step, message))

    def close(self, result):
        self.calls.append(("close", dict(result)))


class Failing(Recorder):
    """Raises at one of the calls."""

    def __init__(self, at):
        super().__init__()
        setattr(self, at, self._fail)

    def _fail(self, *_):
        raise ConnectionError("no route to host\nand more")


def run(trackers):
    trackers.start({"project": "p"})
    for step in (1, 2, 3):
        trackers.log("train", step, {"loss": 1.0 / step})
    trackers.event("checkpoint", 3, "saved", {})
    trackers.close({"steps": 3})


def test_everyone_hears_everything_in_order():
    first, second = Recorder(), Recorder()
    run(Trackers({"first": first, "second": second}))
    assert first.calls == second.calls
    assert [call[0] for call in first.calls] == ["start", "log", "log", "log", "event", "close"]


@pytest.mark.parametrize("at", ["start", "log", "event", "close"])
def test_a_failing_tracker_is_left_out_with_one_warning(at):
    good, bad, alone = Recorder(), Failing(at), Recorder()
    run(Trackers({"alone": alone}))
    run(Trackers({"good": good, "bad": bad}))
    warnings = [call for call in good.calls if call[:2] == ("event", "warning")]
    assert [call[3] for call in warnings] == ["tracking by bad stopped: no route to host"]
    assert [call for call in good.calls if call not in warnings] == alone.calls


def test_all_failing_still_does_not_stop_the_run(caplog):
    with caplog.at_level(logging.WARNING, logger="meshwright.tracking"):
        run(Trackers({"a": Failing("log"), "b": Failing("event")}))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "tracking by b stopped",
        "tracking by a stopped",
    ]


def test_scalars_of_any_kind_arrive_as_plain_numbers():
    recorder = Recorder()
    values = {"a": np.float32(0.5), "b": np.array(2.0), "c": 3, "d": np.int64(4)}
    Trackers({"r": recorder}).log("train", 1, values)
    told = recorder.calls[0][3]
    assert told == {"a": 0.5, "b": 2.0, "c": 3, "d": 4.0}
    assert all(type(value) in (int, float) for value in told.values())
