"""The files of a run folder, also after a process was killed in the middle of a line."""

import json
import math

import pytest

from meshwright.tracking.run_files import RunFiles, repair_last_line, run_name

pytestmark = pytest.mark.quick


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_and_events_are_readable_while_the_run_goes_on(tmp_path):
    tracker = RunFiles(tmp_path)
    tracker.start({"project": "p"})
    # A metric does not overwrite what says where a line belongs.
    tracker.log("train", 1, {"loss": 2.5, "step": 7.0})
    tracker.event("checkpoint", 1, "saved", {"path": tmp_path})
    (metric,), (event,) = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "events.jsonl")
    assert metric == {"split": "train", "step": 1, "time": metric["time"], "loss": 2.5}
    assert event["path"] == str(tmp_path)
    assert (event["kind"], event["step"], event["message"]) == ("checkpoint", 1, "saved")


def test_a_finished_run_has_a_result_and_a_failed_one_has_none(tmp_path):
    for result in ({"steps": 3, "final_loss": math.nan}, {}):
        tracker = RunFiles(tmp_path)
        tracker.start({})
        assert not (tmp_path / "result.json").exists()
        tracker.close(result)
        assert (tmp_path / "result.json").exists() == bool(result)
        if result:
            written = json.loads((tmp_path / "result.json").read_text())
            assert written == {"steps": 3, "final_loss": None}


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    tracker = RunFiles(tmp_path)
    tracker.log("train", 1, {"loss": math.nan, "grad_norm": math.inf})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["loss"] is line["grad_norm"] is None


def test_a_run_that_goes_on_keeps_its_lines_and_its_first_start(tmp_path):
    for step in (1, 2):
        tracker = RunFiles(tmp_path)
        tracker.start({"started": f"2030-01-0{step}T00:00:00"})
        tracker.log("train", step, {"loss": 1.0})
        tracker.close({})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["started"] == "2030-01-01T00:00:00"
    assert len(facts["resumed"]) == 1


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_does_not_spoil_the_next(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"split": "train", "step": 1}\n{"step": 2, "name": "\xc3\xa4"}\n'
    path.write_bytes(whole[:-cut])
    kept = [json.loads(line) for line in whole[:-cut].split(b"\n") if line.endswith(b"}")]
    RunFiles(tmp_path).log("train", 3, {})
    read = lines(path)
    assert read[:-1] == kept
    assert read[-1]["step"] == 3


def test_mending_leaves_whole_files_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    repair_last_line(path)
    assert not path.exists()
    for content in (b"", b'{"a": 1}\n'):
        path.write_bytes(content)
        repair_last_line(path)
        assert path.read_bytes() == content


def test_a_resumed_run_keeps_its_name_unless_it_is_given_another(tmp_path):
    for given, name in ((None, None), ("first", "first"), (None, "first"), ("second", "second")):
        RunFiles(tmp_path).start({"name": given})
        assert json.loads((tmp_path / "run.json").read_text())["name"] == name
        assert run_name(tmp_path, {}) == (name or "/".join(tmp_path.parts[-2:]))
