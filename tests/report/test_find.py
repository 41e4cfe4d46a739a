"""Which folders are runs, and which of them a name stands for."""

import os

import pytest

from meshwright.errors import UserError
from meshwright.report.read import find_runs

pytestmark = pytest.mark.quick


def make_run(folder, age):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    os.utime(folder / "run.json", (1e9 - age, 1e9 - age))
    return folder


def test_a_folder_of_runs_stands_for_those_inside_newest_first(tmp_path):
    old = make_run(tmp_path / "project" / "day1" / "time", age=50)
    new = make_run(tmp_path / "project" / "day2" / "time", age=0)
    sweep = [make_run(tmp_path / "multirun" / "p" / "d" / "t" / str(n), 10 - n) for n in range(3)]
    make_run(new / "checkpoints" / "inner", age=0)
    assert find_runs([tmp_path]) == [new, *reversed(sweep), old]
    assert find_runs([tmp_path / "project" / "day1"]) == [old]


def test_named_runs_keep_their_order_and_come_once(tmp_path):
    first, second = (make_run(tmp_path / name, age=0) for name in ("b", "a"))
    assert find_runs([first, second, first]) == [first, second]


def test_a_folder_without_runs_is_an_error_that_says_what_makes_one(tmp_path):
    with pytest.raises(UserError, match="is not a run folder, and contains none") as caught:
        find_runs([tmp_path])
    assert "run.json or metrics.jsonl" in str(caught.value)
    with pytest.raises(UserError, match="there is no folder"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is no folder"):
        find_runs([tmp_path / "file"])
