"""The commands that a command prints can be pasted: they start the same program."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.invocation import invoked_as


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Make a virtual environment with a `meshwright` script that is not on the path."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "meshwright"):
        (folder / name).write_text("#!/bin/sh\necho $0 $*\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return folder


def test_an_active_environment_needs_no_path(environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin:/bin")
    assert invoked_as() == ["meshwright"]


def test_a_path_that_was_typed_is_printed_again_and_works(environment, monkeypatch):
    typed = str(environment / "meshwright")
    monkeypatch.setattr(sys, "argv", [typed, "train"])
    line = shlex.join([*invoked_as(), "report", "a folder"])
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == f"{typed} report a folder\n"


def test_a_program_of_another_environment_is_not_taken_for_this_one(environment, monkeypatch):
    other = environment.parent / "other"
    other.mkdir()
    (other / "meshwright").write_text("#!/bin/sh\n")
    (other / "meshwright").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.setattr(sys, "argv", [str(Path("src/meshwright/__main__.py").absolute())])
    monkeypatch.setattr(sys, "orig_argv", ["venv/bin/python", "-m", "meshwright", "train"])
    assert invoked_as() == ["venv/bin/python", "-m", "meshwright"]
