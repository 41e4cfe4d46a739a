"""Reading run folders in every state: whole, torn, resumed, long, and full of surprises."""

import json
from datetime import datetime

import numpy as np
import pytest
from report.sample_runs import NUM_LOGGED, write_run

from meshwright.report.read import downsample, read_curves, read_run

pytestmark = pytest.mark.quick


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def curves(path):
    return {(curve["split"], curve["metric"]): curve["points"] for curve in read_curves(path)}


def test_a_whole_run_is_read_back(tmp_path):
    run = read_run(write_run(tmp_path / "day" / "time"))
    assert run["name"] == "day/time"
    assert run["facts"]["mesh"] == {"fsdp": 4, "tensor": 2}
    assert run["result"]["final_loss"] == 1.93
    assert run["profile"]["shares"]["compute"] == 0.61
    assert run["ledger"]["axes"]["fsdp"]["ratio"] == 1.0084
    assert {entry["key"] for entry in run["config"]} >= {"mesh.fsdp", "optimizer.learning_rate"}
    assert [event["kind"] for event in run["events"]].count("checkpoint") == 4
    loss = next(c for c in run["curves"] if (c["split"], c["metric"]) == ("train", "loss"))
    assert loss["count"] == len(loss["points"]) == NUM_LOGGED


def test_a_run_that_failed_says_why_until_it_is_started_again(tmp_path):
    stop = {"kind": "stop", "step": 9, "message": "failed: the loss is nan at step 7"}
    write_lines(tmp_path / "events.jsonl", stop | {"failed": True, "time": 2e9})
    assert read_run(tmp_path)["failure"] == "failed: the loss is nan at step 7"
    facts = {"started": "2026-01-01T00:00:00+00:00", "resumed": ["2040-01-01T00:00:00+00:00"]}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert read_run(tmp_path)["failure"] is None
    (tmp_path / "run.json").write_text(json.dumps(facts | {"resumed": "?"}))
    assert read_run(tmp_path)["failure"] is not None
    write_lines(tmp_path / "events.jsonl", stop | {"message": "all steps are done"})
    assert read_run(tmp_path)["failure"] is None


def test_the_time_of_a_resumed_run_is_that_of_all_its_attempts(tmp_path):
    starts = ["2030-01-01T00:00:00+00:00", "2030-01-02T00:00:00+00:00", "2030-01-03T00:00:00+00:00"]
    (tmp_path / "run.json").write_text(json.dumps({"started": starts[0], "resumed": starts[1:]}))
    first, second, third = (datetime.fromisoformat(text).timestamp() for text in starts)
    stops = [
        {"kind": "stop", "time": first + 70, "seconds": 75.5},
        {"kind": "stop", "time": third + 9, "seconds": 10.0},
    ]
    write_lines(tmp_path / "events.jsonl", *stops)
    # The second attempt was killed.
    write_lines(tmp_path / "metrics.jsonl", {"split": "train", "step": 9, "time": second + 30})
    assert read_run(tmp_path)["seconds"] == 75.5 + 30 + 10
    (tmp_path / "run.json").write_text(json.dumps({"started": starts[0]}))
    assert read_run(tmp_path)["seconds"] is None


def test_an_empty_folder_is_an_empty_run(tmp_path):
    run = read_run(tmp_path)
    assert run["facts"] == {}
    assert run["result"] is run["profile"] is run["ledger"] is None
    assert run["curves"] == run["config"] == run["events"] == []


def test_of_two_lines_of_one_step_the_later_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(
        path,
        *({"split": "train", "step": u, "loss": 10.0 + u} for u in (1, 2, 3)),
        *({"split": "train", "step": u, "loss": 20.0 + u} for u in (2, 3, 4)),
        {"split": "eval", "step": 2, "loss": 5.0},
    )
    assert curves(path) == {
        ("train", "loss"): [(1, 11.0), (2, 22.0), (3, 23.0), (4, 24.0)],
        ("eval", "loss"): [(2, 5.0)],
    }


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"split": "train", "step": 1, "loss": 1.0, "note": "x", "flag": True})
    path.write_bytes(
        good.encode() + b'\n[1]\nnull\n{"split": 3}\n\xff\xfe\n{"split": "train", "upd'
    )
    assert curves(path) == {("train", "loss"): [(1, 1.0)]}


def test_numbers_that_are_not_finite_become_gaps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, *({"split": "train", "step": u, "loss": None} for u in (1, 2)))
    assert curves(path) == {("train", "loss"): [(1, None), (2, None)]}


def test_a_config_without_origins_is_read_from_its_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text("mesh:\n  fsdp: 4\nstrict: false\n")
    assert read_run(tmp_path)["config"] == [
        {"key": "mesh.fsdp", "value": 4, "origin": ""},
        {"key": "strict", "value": False, "origin": ""},
    ]


@pytest.mark.parametrize("count", [10, 100, 101, 5_000])
def test_a_long_curve_keeps_its_ends_and_every_spike(count):
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3] = 100.0
    values[count // 2] = -100.0
    points = list(enumerate(values.tolist()))
    kept = downsample(points, most=100)
    assert len(kept) <= 100
    assert kept == sorted(set(kept) & set(points))
    assert {points[0], points[-1], points[count // 3], points[count // 2]} <= set(kept)
    assert (kept == points) == (count <= 100)
    assert downsample([(n, None) for n in range(count)], most=100)[-1] == (count - 1, None)


def test_answers_to_prompts_are_a_table_by_prompt_and_step(tmp_path):
    said = [["1 + 1 =", "<b>2</b>"], ["2 + 2 =", "5"]]
    events = [
        {"kind": "sample", "step": 5, "message": "", "completions": said},
        {"kind": "sample", "step": 9, "message": "a text without prompts"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
    later = [["1 + 1 =", "2"], ["2 + 2 =", "4"]]
    (tmp_path / "result.json").write_text(json.dumps({"steps": 9, "completions": later}))
    rows = [tuple(row.values()) for row in read_run(tmp_path)["completions"]]
    assert rows == [
        ("1 + 1 =", 5, "<b>2</b>"), ("1 + 1 =", 9, "2"), ("2 + 2 =", 5, "5"), ("2 + 2 =", 9, "4"),
    ]  # fmt: skip
