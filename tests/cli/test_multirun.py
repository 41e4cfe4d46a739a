"""`--multirun`: one process for each combination of values."""

import json
import subprocess
import sys

import pytest

from meshwright.cli import multirun
from meshwright.cli.main import main
from meshwright.cli.multirun import expand_sweep, results_table
from meshwright.errors import UserError


@pytest.fixture
def fake_jobs(monkeypatch):
    """Replace the processes: each job's return code comes from the list, its command is kept."""
    commands: list[list[str]] = []

    def start(*returncodes: int) -> list[list[str]]:
        codes = list(returncodes)

        def run(command, **_options):
            commands.append(command)
            return subprocess.CompletedProcess(command, codes.pop(0), stdout="[1]\n")

        monkeypatch.setattr(multirun.subprocess, "run", run)
        return commands

    return start


def test_jobs_are_the_product_of_all_values():
    assert expand_sweep(["training.steps=1,2", "run.seed=7", "mesh.fsdp=2,4"]) == [
        ["training.steps=1", "run.seed=7", "mesh.fsdp=2"],
        ["training.steps=1", "run.seed=7", "mesh.fsdp=4"],
        ["training.steps=2", "run.seed=7", "mesh.fsdp=2"],
        ["training.steps=2", "run.seed=7", "mesh.fsdp=4"],
    ]


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("training.steps=range(1,4)", ["1", "2", "3"]),
        ("training.steps=choice(1,5)", ["1", "5"]),
        ("optimizer=adamw,lion", ["adamw", "lion"]),
        ("precision=glob(*f*16)", ["bf16", "fp16"]),
        ("run.project='a,b','c d'", ["'a,b'", "'c d'"]),
        ("model.mesh_shape=[[4],[tp]],[[8],[tp]]", ["[[4],[tp]]", "[[8],[tp]]"]),
    ],
)
def test_every_way_to_list_values(override, values):
    key = override.partition("=")[0]
    assert expand_sweep([override]) == [[f"{key}={value}"] for value in values]


def test_signs_stay_with_the_key():
    assert expand_sweep(["+experiment=a,b", "~run.seed"]) == [
        ["+experiment=a", "~run.seed"],
        ["+experiment=b", "~run.seed"],
    ]


def test_without_several_values_there_is_one_job():
    assert expand_sweep([]) == [[]]
    assert expand_sweep(["model.mesh_shape=[[4,1],[fsdp,tp]]"]) == [
        ["model.mesh_shape=[[4,1],[fsdp,tp]]"]
    ]


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.learning_rate=interval(0,1)",
        "run=glob(x*)",
        "training.steps=glob(*)",
        "training.steps=range(3,1)",
        "training.steps=range(0,1,0)",
    ],
)
def test_values_that_cannot_be_listed_are_refused(override):
    with pytest.raises(UserError, match="has no values to run"):
        expand_sweep([override])


def test_each_job_gets_its_overrides_its_directory_and_our_flags(fake_jobs, capfd):
    commands = fake_jobs(0, 0)
    words = ["training.steps=1,2", "hydra.sweep.dir='my sweep'", "-m", "--debug"]
    assert main(["train", *words]) == 0
    out, err = capfd.readouterr()
    assert commands[1][1:] == [
        "-P",
        "-m",
        "meshwright",
        "train",
        "training.steps=2",
        "hydra.sweep.dir='my sweep'",
        "hydra.run.dir='my sweep/1'",
        "--debug",
    ]
    assert commands[0][0] == sys.executable
    assert out.startswith("[1]\n[1]\nrun  settings ")
    assert "job 2 of 2: training.steps=2" in err


def test_all_jobs_run_and_the_first_failure_is_the_exit_code(fake_jobs, capfd):
    commands = fake_jobs(0, -9, 2)
    assert main(["train", "-m", "--json", "training.steps=1,2,3"]) == 128 + 9
    results = json.loads(capfd.readouterr().out)
    assert len(commands) == 3
    assert [job["exit_code"] for job in results] == [0, 137, 2]
    assert [job["overrides"] for job in results] == [[f"training.steps={n}"] for n in (1, 2, 3)]
    assert results[0]["result"] == [1]


def test_brackets_in_values_are_shown_as_typed(fake_jobs, capfd):
    fake_jobs(0)
    assert main(["train", "-m", "model.mesh_shape=[[4,1],[fsdp,tp]]", "data.x='[/bold]'"]) == 0
    assert "model.mesh_shape=[[4,1],[fsdp,tp]] data.x='[/bold]'" in capfd.readouterr().err.replace(
        "\n", ""
    )


def test_a_sweep_that_cannot_be_composed_starts_no_job(fake_jobs, capfd):
    commands = fake_jobs()
    assert main(["train", "--multirun", "trainig.steps=1,2"]) == 2
    assert "did you mean `training.steps`?" in capfd.readouterr().err
    assert commands == []


def test_jobs_are_real_processes_with_their_own_result(capfd):
    assert main(["config", "--multirun", "--json", "--cfg=job", "training.steps=5,-1"]) == 2
    captured = capfd.readouterr()
    good, bad = json.loads(captured.out)
    assert (good["exit_code"], good["result"]["training"]["steps"]) == (0, 5)
    assert (bad["exit_code"], bad["result"]) == (2, None)
    assert "error: `training.steps=-1` is not valid" in captured.err


def test_a_sweep_ends_with_a_table_of_its_losses(tmp_path):
    first = [(1, "train", 3.0), (2, "train", 2.5), (2, "eval", 2.6)]
    second = [(1, "train", 3.0), (2, "train", None), (1, "eval", 2.0), (2, "eval", 2.8)]
    for number, losses in enumerate((first, second)):
        (tmp_path / str(number)).mkdir()
        lines = [{"split": split, "step": step, "loss": loss} for step, split, loss in losses]
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / str(number) / "metrics.jsonl").write_text(text)
    jobs = [["model=mlp", f"optimizer.learning_rate={rate}"] for rate in (0.1, 0.2)]
    table = results_table(jobs, tmp_path)
    assert [row[:6] for row in table.rows] == [
        ("0", "optimizer.learning_rate=0.1", "2.5000", "2.5000", "2.6000", "2.6000"),
        ("1 *", "optimizer.learning_rate=0.2", "–", "3.0000", "2.8000", "2.0000"),
    ]
    # A job that failed has written nothing; then the losses of training count.
    failed = results_table([*jobs, ["model=mlp", "optimizer.learning_rate=x"]], tmp_path)
    assert [row[0] for row in failed.rows] == ["0 *", "1", "2"]
