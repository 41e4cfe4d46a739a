"""`meshwright report` as a person meets it."""

import json

import pytest
from report.sample_runs import write_run

from meshwright.cli.main import main


@pytest.fixture
def run(capfd):
    def call(*argv):
        code = main(["report", *map(str, argv)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "lr=1,x" / str(n)) for n in range(2)]


def test_the_page_goes_into_the_run_and_its_path_is_printed(run, folders):
    code, out, _ = run(folders[0])
    assert (code, out) == (0, f"{folders[0] / 'report.html'}\n")
    assert (folders[0] / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_make_one_page_in_the_folder_that_holds_them(run, folders, tmp_path):
    for named in (folders, [folders[0].parent]):
        code, out, _ = run(*named, "--json")
        assert code == 0
        told = json.loads(out)
        assert told["report"] == str(tmp_path / "lr=1,x" / "report.html")
        assert sorted(told["runs"]) == list(map(str, folders))


def test_the_page_goes_where_out_says(run, folders, tmp_path):
    wanted = tmp_path / "page.html"
    code, out, _ = run(folders[0], "--out", wanted)
    assert (code, out) == (0, f"{wanted}\n")
    assert wanted.exists()
    assert not (folders[0] / "report.html").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no run was given"),
        (["nowhere"], "there is no folder nowhere"),
        (["."], "is not a run folder, and contains none"),
        (["mesh.fsdp=4"], "there is no folder mesh.fsdp=4"),
        (["--multirun", "."], "has no flag `--multirun`"),
    ],
)
def test_what_is_no_run_is_one_clear_error(run, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[0]
    assert "Traceback" not in err


def test_a_page_that_cannot_be_written_is_a_users_error(run, folders, tmp_path):
    code, _, err = run(folders[0], "--out", tmp_path / "no" / "page.html")
    assert code == 2
    assert "cannot write" in err


def test_too_many_runs_are_cut_and_the_cut_is_told(run, folders, monkeypatch):
    monkeypatch.setattr("meshwright.cli.report.MAX_RUNS", 1)
    code, out, err = run(*folders, "--json")
    assert code == 0
    assert json.loads(out)["runs"] == [str(folders[0])]
    assert "2 runs found; the first 1 are on the page" in err
