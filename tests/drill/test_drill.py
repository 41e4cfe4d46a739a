"""Drills: a real run recovers from every fault, and a drill says if it does not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.drill import launched as launches
from meshwright.drill import run_drill
from meshwright.drill.fault_makers import IN_CHECKPOINT, IN_PROCESS
from meshwright.drill.launched import Launched, Line, NotSurvived, RunFolder
from meshwright.drill.run_drill import FAULTS
from meshwright.drill.trial import Configuration, Fault, Trial

LIMIT_SECONDS = 1200
SMALL = ("model=mlp", "model.widths=[784,32,10]", "optimizer=sgd")


def drill(folder: Path, *words: str, own: bool = False) -> tuple[int, Any, str]:
    """Run a drill as a user does, and return its exit code, its report and its messages."""
    (folder / "tmp").mkdir()
    settings = () if own else SMALL
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "drill", "--json", *settings, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder / "tmp")},
    )
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def verdicts(report: Any) -> dict[str, tuple[str, str]]:
    return {row["fault"]: (row["verdict"], row["happened"]) for row in report["rows"]}


# tests/faults makes the same faults in real processes every day, in the processes of a drill.
@pytest.mark.full
def test_a_fault_is_survived_and_nothing_is_left(tmp_path):
    code, report, err = drill(tmp_path, "mesh.data=2", "--only=differing", "--steps=6")
    assert code == 0, err
    rows = verdicts(report)
    assert rows["differing"] == (
        "passed",
        "exit code 2 before compiling: run.seed is 0 in process 0 and 97531 in process 1",
    )
    assert report["passed"] is True
    assert (report["mesh"], report["processes"], report["steps"]) == ({"data": 2}, 2, 6)
    assert "passed  differing: exit code 2" in err
    assert not list((tmp_path / "tmp").iterdir())


# Each fault has a test of its own in tests/faults; this one takes as long as all of those.
@pytest.mark.full
def test_all_faults_are_survived(tmp_path):
    code, report, err = drill(tmp_path, "mesh.fsdp=2")
    assert code == 0, err
    rows = verdicts(report)
    assert set(rows) == set(FAULTS)
    assert {verdict for verdict, _ in rows.values()} == {"passed"}, rows
    for name in ("sigkill", "sigkill-first", "sigstop", "gil"):
        pattern = r"restarted from step [46], losses and state bit-equal"
        assert re.search(pattern, rows[name][1]), rows[name]
    for name in ("sigkill-launcher", "preempt", "ctrl-c-twice", "exception", "nan-batch"):
        assert "losses and state bit-equal" in rows[name][1]
    assert not list((tmp_path / "tmp").iterdir())


OWN = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(784, 10, rngs=rngs)

    def __call__(self, image):
        return self.out(image.reshape(image.shape[0], -1))
"""


@pytest.mark.full
@pytest.mark.faults
def test_one_process_of_an_own_model_says_what_cannot_happen(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = ("model.kind=own:Net", "task=classification", "task.num_classes=10", "data=digits")
    chosen = "--only=sigkill,sigkill-first,taken-port,differing,resize"
    code, report, err = drill(tmp_path, *words, "--nprocs=1", "--keep", chosen, own=True)
    assert code == 0, err
    rows = verdicts(report)
    assert rows["sigkill"][0] == "passed"
    one = ("not applicable", "there is one process; --nprocs 2 starts another")
    assert rows["sigkill-first"] == rows["taken-port"] == rows["differing"] == one
    assert rows["resize"] == ("not applicable", "1 device cannot be divided over 2 processes")
    assert Path(report["folder"], "sigkill", "run", "checkpoints", "8").is_dir()


@pytest.mark.full
@pytest.mark.faults
def test_a_configuration_that_fails_by_itself_ends_the_drill(tmp_path):
    code, report, err = drill(tmp_path, "mesh.data=3")
    assert (code, report) == (2, None)
    assert "error: this configuration fails without any fault" in err
    assert "the mesh does not match the 2 devices" in err
    assert "nearest meshes that work: mesh.data=2" in err
    assert "all of its output: meshwright launch --nprocs=2 -- train" in err
    assert not list((tmp_path / "tmp").iterdir())


def test_what_makes_a_fault_belongs_to_a_fault():
    assert not {*IN_PROCESS, *IN_CHECKPOINT} - set(FAULTS)


def test_the_list_names_every_fault(capfd):
    assert main(["drill", "--list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [each["fault"] for each in listed] == list(FAULTS)
    assert all(each["what"] and each["expected"] for each in listed)
    assert main(["drill", "--list", "--only=preempt"]) == 0
    out = capfd.readouterr().out
    assert "SIGTERM to the last process" in out
    assert "sigkill" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only=sigkil"], "there is no fault `sigkil`: did you mean `sigkill`?"),
        (["--steps=3"], "--steps 3 is not enough for a drill"),
        (["--nprocs=0"], "--nprocs 0 is not valid"),
        (["--devices-per-process=x"], "--devices-per-process x is not valid"),
        (["mesh.dta=2"], "mesh.dta"),
    ],
)
def test_bad_input_is_told_before_anything_starts(capfd, words, message):
    assert main(["drill", *words]) == 2
    assert message in capfd.readouterr().err


def test_a_drill_is_not_launched(capfd, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["drill"]) == 2
    assert "a drill starts its processes itself" in capfd.readouterr().err


def test_a_fault_that_is_not_survived_fails_the_drill(tmp_path, capfd, monkeypatch):
    """The exit code is 1, the table says what is wrong, and what it left is kept."""

    def undisturbed(configuration, folder):
        run = written_run(folder / "run", {1: 0.5})
        return Trial(configuration, folder, baseline=run, seconds=1.0)

    def check(trial: Trial) -> str:
        written_run(trial.folder / "run", {1: 0.25})
        trial.check_same()
        return "never"

    monkeypatch.setattr(run_drill, "_run_without_fault", undisturbed)
    monkeypatch.setitem(FAULTS, "own", Fault("own", "something", "nothing", check))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["drill", "--only=own"]) == 1
    out = capfd.readouterr().out
    assert "failed" in out
    assert "the loss of step 1 is 0.25 instead of 0.5" in out
    assert "data=2 in 2 processes: 0 passed, 1 failed, in" in out
    (kept,) = tmp_path.iterdir()
    assert f"logs and run folders: {kept}" in out
    assert (kept / "own" / "run" / "metrics.jsonl").is_file()


def written_run(folder: Path, losses: dict[int, float]) -> RunFolder:
    """Write a run folder with losses and no checkpoints."""
    folder.mkdir(parents=True)
    rows = [{"split": "train", "step": n, "loss": loss} for n, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plan.yaml").write_text("mesh: {data: 2}\n")
    return RunFolder(folder)


def test_losses_are_compared_at_every_step(tmp_path):
    whole = written_run(tmp_path / "a", {1: 0.5, 2: 0.25})
    short = written_run(tmp_path / "b", {1: 0.5})
    with pytest.raises(NotSurvived, match="step 2 was not done"):
        short.check_same(whole)
    with pytest.raises(NotSurvived, match="step 2 was not done"):
        short.difference(whole)
    assert written_run(tmp_path / "c", {1: 0.5, 2: 0.5}).difference(whole) == 1.0


def test_a_launch_is_judged_by_what_it_prints_and_when(tmp_path):
    notes = [{"rank": 1, "time": 100.0, "committed": [2]}]
    (tmp_path / "injected-1.json").write_text(json.dumps(notes[0]))
    lines = [Line(101.5, "[1] hello"), Line(103.0, "error: process 1 was killed at step 5")]
    launched = Launched(1, lines, 112.0, tmp_path)
    texts = ["[0] plan", "[1] error: no such key", "[1]   known: a, b", "[0]   x", "[1]   write a"]
    failed = Launched(2, [Line(1.0, text) for text in texts], 2.0, tmp_path)
    assert failed.message() == "[1] error: no such key\nknown: a, b\nwrite a"
    assert launched.noticed(r"process 1 was killed", 10.0) == 3.0
    assert launched.find(r"at step (\d+)")[1] == "5"
    for failing, told in [
        (lambda: launched.noticed("was killed", 2.0), "noticed after 3.0 s, more than 2 s"),
        (lambda: launched.stopped(10.0), "ended 12.0 s after the fault, more than 10 s"),
        (lambda: launched.check_code(0, 75), "exit code 1 instead of 0 or 75: error: process 1"),
        (lambda: launched.find("restart 1"), "no line says 'restart 1'"),
        (lambda: launched.check_silent_about("hello"), "it prints"),
        (lambda: launched.check_none_lost(0), "though step 2 was committed"),
    ]:
        with pytest.raises(NotSurvived, match=re.escape(told)):
            failing()


def test_processes_that_are_left_are_found(monkeypatch):
    monkeypatch.setattr(launches, "LEAVE_SECONDS", 0.3)
    sleeper = subprocess.Popen(["sleep", "60"], process_group=0)
    try:
        assert launches.running_in([sleeper.pid]) == [sleeper.pid]
        sleeper.kill()
        # Nobody has asked for its exit code yet.
        assert launches.running_in([sleeper.pid]) == []
    finally:
        sleeper.kill()
        sleeper.wait()


def test_faults_come_after_two_checkpoints_and_before_the_end():
    for steps in range(6, 50):
        configuration = Configuration((), 2, None, steps)
        assert 2 * configuration.every < configuration.step < steps
