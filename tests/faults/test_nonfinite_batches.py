"""Row 15: a batch with a NaN, which only one process has, under every policy."""

import json
import re

import numpy as np
import pytest
from faults.harness import checkpoints, events, launch, metrics, read_all

pytestmark = [pytest.mark.full, pytest.mark.faults]

WITHOUT = """
    whole = data

    def data(step, batch_size):
        return whole(step + {left_out} * (step >= {first}), batch_size)
"""


def check_finite(run) -> None:
    """Check that no checkpoint of a run has a NaN."""
    for groups in read_all(run).values():
        for arrays in groups.values():
            assert all(np.isfinite(array).all() for array in arrays.values())


def values(run):
    """Return what was computed, without the numbers of steps and what counts skipped ones."""
    return [
        {name: value for name, value in each.items() if name != "skipped"}
        for each in metrics(run).values()
    ]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Runs that never had the batches ``first`` to ``first + left_out``."""

    def get(first: int, left_out: int, steps: int):
        folder = tmp_path_factory.mktemp("clean")
        own = WITHOUT.format(first=first, left_out=left_out)
        done = launch(folder, own=own, steps=steps).finish()
        assert done.code == 0, done.err
        return values(done.run)

    return get


def test_a_nan_batch_stops_all_processes_and_is_left_out_if_that_is_asked_for(tmp_path, clean):
    stopped = launch(tmp_path, "--restarts=3", fault="nan-batch").finish()
    assert stopped.code == 4, stopped.err
    assert re.fullmatch(r"\[\d\] error: the loss is nan at step 5", stopped.first_error)
    assert stopped.err.count("error: the loss is nan at step 5") == 1
    assert "restart 1" not in stopped.err
    assert re.search(r"batch 4\b", stopped.err)
    assert re.search(r"meshwright replay \S+/incidents/000005", stopped.err)
    assert max(checkpoints(stopped.run)) == 4
    record = json.loads((stopped.run / "incidents/000005/record.json").read_text())
    assert record["step"] == 5
    check_finite(stopped.run)
    # The same command goes on from there, without the batch.
    words = ("training.on_nonfinite=skip",)
    again = launch(tmp_path, fault="nan-batch", words=words).finish()
    assert again.code == 0, again.err
    assert "continuing after step 4" in again.err
    assert [e["step"] for e in events(again.run) if e["kind"] == "incident"][-1] == 5
    check_finite(again.run)
    assert values(again.run) == clean(first=4, left_out=1, steps=9)


def test_a_nan_batch_rewinds_all_processes(tmp_path, clean):
    words = ("training.on_nonfinite=rewind",)
    done = launch(tmp_path, fault="nan-batch", words=words).finish()
    assert done.code == 0, done.err
    (incident,) = [e for e in events(done.run) if e["kind"] == "incident"]
    assert (incident["step"], incident["batch"]) == (5, 4)
    check_finite(done.run)
    # Back to step 3, so batches 3 and 4 are left out.
    rows = (done.run / "metrics.jsonl").read_text().splitlines()
    last = {row["step"]: row["loss"] for row in map(json.loads, rows) if row["split"] == "train"}
    expected = clean(first=3, left_out=2, steps=10)
    assert list(last.values()) == [each["loss"] for each in expected]
