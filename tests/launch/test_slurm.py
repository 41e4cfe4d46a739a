"""The sbatch script of `launch --slurm`: what it asks for, and when it is requeued."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.launch.options import parse_launch
from meshwright.launch.slurm import limit_seconds

STUBS = {
    # Runs the tasks one after another, and returns the largest exit code, as srun does.
    "srun": """
        while [ "$1" != bash ]; do shift; done
        largest=0
        for SLURM_PROCID in 0 1; do
          export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID
          "$@"; code=$?
          [ $code -gt $largest ] && largest=$code
        done
        exit $largest""",
    "scontrol": """
        case "$*" in
          "show hostnames node[1-2]") printf 'node1\\nnode2\\n' ;;
          "--oneliner show node node1") echo "NodeName=node1 NodeAddr=10.0.0.7 Port=1" ;;
          *) echo "$*" >> "$STUBS/called" ;;
        esac""",
    # Prints its input and options instead of submitting a job.
    "sbatch": """
        echo "$*" > "$STUBS/options"; cat > "$STUBS/script"; echo '41;cluster'""",
}
WORKER = """
import os, sys
rank = os.environ["SLURM_PROCID"]
names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "JAX_LOCAL_DEVICE_IDS")
print(rank, [os.environ.get(name) for name in names], sys.argv[1:])
sys.exit(int(os.environ["CODES"].split(",")[int(rank)]))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put programs before SLURM's own, and return the folder of what they were called with."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash{text}\n")
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setenv("RANK", "7")
    work = tmp_path / "it's work"
    work.mkdir()
    (work / "worker.py").write_text(WORKER)
    monkeypatch.chdir(work)
    return stubs


def script(capsys, *flags: str, program=("worker.py", "a b", "$HOME", "it's")) -> str:
    assert main(["launch", "--slurm", *flags, "--dry-run", "--", *program]) == 0
    return capsys.readouterr().out


def run(text: str, codes: str) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[1-2]", "CODES": codes}
    return subprocess.run(
        ["bash", "-c", text],
        env={**os.environ, **job},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.M)


def test_the_script_asks_for_what_the_flags_say(cluster, capsys):
    flags = ["--nodes", "2", "--nprocs", "4", "--time", "4:00:00", "--partition", "gpu"]
    flags += ["--account", "lab", "--gpus-per-node", "4", "--save-seconds", "120", "--name", "big"]
    assert directives(script(capsys, *flags, "--sbatch", "--mem=0 --qos=high")) == [
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--time=4:00:00",
        "--partition=gpu",
        "--account=lab",
        "--gpus-per-node=4",
        f'--chdir="{Path.cwd()}"',
        "--output=slurm-%j.out",
        "--open-mode=append",
        "--signal=USR1@120",
        "--requeue",
        "--mem=0",
        "--qos=high",
    ]


def test_each_task_gets_its_words_as_written_and_the_address_of_the_first_node(cluster, capsys):
    text = script(capsys, "--nodes", "2", "--nprocs", "2", "--gpus-per-node", "4")
    done = run(text, "0,0")
    assert done.returncode == 0, done.stderr
    words = ["a b", "$HOME", "it's"]
    assert done.stdout.splitlines() == [
        f"{rank} {['10.0.0.7', str(41 + 61440), None, gpus]} {words}"
        for rank, gpus in enumerate(["0,1", "2,3"])
    ]
    assert not (cluster / "called").exists()


def test_the_address_can_be_given(cluster, capsys):
    assert "['10.9.9.9', '61481'" in run(script(capsys, "--coordinator", "10.9.9.9"), "0,0").stdout
    given = run(script(capsys, "--coordinator", "10.9.9.9:7000"), "0,0").stdout
    assert "['10.9.9.9', '7000'" in given


@pytest.mark.parametrize(
    ("codes", "first", "says"),
    [
        ("75,75", 75, "preempted"),
        ("138,138", 138, "preempted"),
        ("0,0", 0, ""),
        # The task that failed first counts: the others save and exit 75 when srun ends them.
        ("2,75", 2, "a mistake in the input"),
        ("3,75", 3, "too little memory"),
        ("4,75", 4, "a step that is not finite"),
        ("1,143", 1, "restart 1 of 3"),
        ("137,75", 137, "restart 1 of 3"),
    ],
)
def test_the_exit_code_decides_whether_the_job_is_requeued(cluster, capsys, codes, first, says):
    done = run(script(capsys), codes)
    assert done.returncode == first
    assert says in done.stdout
    called = (cluster / "called").read_text() if (cluster / "called").exists() else ""
    assert called == ("" if first in (0, 2, 3, 4) else "requeue 41\n")


def test_the_documentation_names_the_exit_codes_that_are_not_requeued(cluster, capsys):
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    row = re.search(r"^\| (.*) \| a mistake in the input.* \| fails \|$", page, re.M)
    fatal = re.findall(r"^  (\d+)\)\n.*is not requeued", script(capsys), re.M)
    assert re.findall(r"\d+", row[1]) == fatal


def test_failures_are_requeued_as_often_as_asked_and_preemptions_always(cluster, capsys):
    text = script(capsys, "--restarts", "2")
    codes = [run(text, code).stdout.splitlines()[-1] for code in ("1,1", "75,75", "9,1", "1,1")]
    assert codes == [
        "exit code 1: job 41 is requeued, restart 1 of 2",
        "preempted: job 41 is requeued and resumes",
        "exit code 9: job 41 is requeued, restart 2 of 2",
        "exit code 1: job 41 has failed 3 times and is not requeued",
    ]
    assert (cluster / "called").read_text() == "requeue 41\n" * 3


def test_a_training_keeps_the_run_folder_it_was_submitted_with(cluster, capsys):
    assert main(["launch", "--slurm", "--nodes", "2", "--", "train", "model=mlp"]) == 0
    out = capsys.readouterr().out
    folder = re.search(r"^run folder: (.*)$", out, re.M)[1]
    assert out.splitlines()[:2] == [
        "submitted SLURM job 41",
        f"log: {Path.cwd() / 'slurm-41.out'}",
    ]
    assert Path(folder).is_relative_to(Path.cwd() / "outputs/meshwright")
    assert (cluster / "options").read_text() == "--parsable\n"
    submitted = (cluster / "script").read_text().replace(sys.executable, "/bin/echo")
    (words, _) = run(submitted, "0,0").stdout.splitlines()
    escaped = folder.replace("'", r"\'")
    assert words == f"-P -m meshwright train model=mlp hydra.run.dir='{escaped}'"


def test_secrets_are_submitted_and_never_printed(cluster, capsys):
    words = ["worker.py", "tracking.api_key=hunter2", "--token", "s3cret"]
    assert main(["launch", "--slurm", "--dry-run", "--", *words]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "s3cret" not in printed.out + printed.err
    assert "secrets are hidden" in printed.err
    assert main(["launch", "--slurm", "--", *words]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "tracking.api_key=hunter2 --token s3cret" in (cluster / "script").read_text()


def test_secrets_in_options_of_sbatch_are_submitted_and_never_printed(cluster, capsys):
    options = (
        "--export=TOKEN=sekret6 --comment=https://me:sekret6@host/x?token=sekret6&run=3",
        "--export=ALL,SEED=3,DB_PASSWORD=sekret6;sekret6)",
    )
    for option in options:
        assert main(["launch", "--slurm", "--dry-run", "--sbatch", option, "worker.py"]) == 0
        printed = capsys.readouterr()
        assert "sekret6" not in printed.out + printed.err
        assert "secrets are hidden" in printed.err
        assert "=(hidden)" in directives(printed.out)[-1]
        assert main(["launch", "--slurm", "--sbatch", option, "worker.py"]) == 0
        assert "sekret6" not in capsys.readouterr().out
        assert directives((cluster / "script").read_text())[-1] == option.split()[-1]


def test_a_mistake_in_the_config_shows_before_the_job_waits(cluster, capsys):
    assert main(["launch", "--slurm", "--", "train", "mesh.fsdq=2"]) == 2
    assert "mesh.fsdq" in capsys.readouterr().err
    assert not (cluster / "script").exists()


@pytest.mark.parametrize(
    "setting",
    ["model.kind=nothere:X", "training.callbacks=[nothere.part:X]", "training.eval_loss=nothere:x"],
)
def test_a_module_that_does_not_exist_shows_before_the_job_waits(cluster, capsys, setting):
    assert main(["launch", "--slurm", "--", "train", setting]) == 2
    err = capsys.readouterr().err
    assert f"cannot load `{setting}`" in err
    assert "No module named 'nothere'" in err
    Path("here.py").write_text("raise AssertionError('is not imported')")
    words = ["train", setting.replace("nothere.part", "here").replace("nothere", "here")]
    assert main(["launch", "--slurm", "--", *words]) == 0


def test_what_sbatch_refuses_is_shown(cluster, capsys):
    (cluster / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    assert main(["launch", "--slurm", "--", "worker.py"]) == 2
    assert "sbatch refused the job\n  invalid partition" in capsys.readouterr().err


def test_without_sbatch_it_says_how_to_submit_elsewhere(cluster, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(cluster / "nothing"))
    assert main(["launch", "--slurm", "--", "worker.py"]) == 1
    assert "run `sbatch job.sh` where sbatch is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slurm --kubernetes -- doctor", "cannot be combined"),
        ("--slurm=yes -- doctor", "--slurm takes no value"),
        ("--slurm --time soon -- doctor", "--time soon is not valid"),
        ("--slurm --partition a'b -- doctor", "--partition a'b is not valid"),
        ("--slurm --sbatch nodes=3 -- doctor", "`nodes=3` is not valid"),
        ("--slurm --node-rank 1 --nodes 2 -- doctor", "--node-rank cannot be used with"),
        ("--slurm --image a -- doctor", "--image needs --kubernetes"),
        ("--nprocs 2 --dry-run -- doctor", "--dry-run needs --slurm or --kubernetes"),
        ("--nprocs 2 --time 1:00 -- doctor", "--time needs --slurm"),
        ("--slurm --restarts -1 -- doctor", "--restarts -1 is not valid"),
        ("--slurm --restarts", "--restarts is not valid"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_launch(words.split())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("5:00", 5 * 60),
        ("0:01", 60),
        ("1:30", 120),
        ("0:01:00", 60),
        ("4:00:00", 4 * 3600),
        ("2-3", 51 * 3600),
        ("1-0:30", 86400 + 1800),
        ("1-0:30:01", 86400 + 1860),
        ("0", None),
        ("", None),
    ],
)
def test_time_limits_are_read_as_sbatch_documents_them(text, seconds):
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ("--time 0:01:00", (60, 90)),
        ("--time 4:00 --save-seconds 300", (240, 300)),
        ("--sbatch --time=1", (60, 90)),
        ("--time 2:00 --sbatch --signal=B:USR1@120", (120, 120)),
        ("--time 1:00 --sbatch --signal=USR1", (60, 60)),
    ],
)
def test_a_job_that_would_save_before_it_starts_is_refused(capsys, flags, seconds):
    assert main(["launch", "--slurm", *flags.split(), "--dry-run", "--", "doctor"]) == 2
    err = capsys.readouterr().err
    limit, lead = seconds
    assert f"has to save {lead} seconds before its end" in err
    assert f"it is {limit} seconds" in err
    assert f"or --save-seconds {limit // 3}" in err


@pytest.mark.parametrize(
    "flags", ["--time 0:01:00 --save-seconds 20", "--time 2", "--time 0", "--save-seconds 3000"]
)
def test_a_job_with_time_to_save_is_made(capsys, flags):
    assert main(["launch", "--slurm", *flags.split(), "--dry-run", "--", "doctor"]) == 0
    assert "--signal=USR1@" in capsys.readouterr().out


def test_gpus_that_processes_cannot_share_and_runs_that_cannot_resume_are_refused(cluster, capsys):
    flags = ["--nprocs", "3", "--gpus-per-node", "4"]
    assert main(["launch", "--slurm", *flags, "--", "worker.py"]) == 2
    assert "3 processes with 1 GPU each cannot share 4 GPUs" in capsys.readouterr().err
    assert main(["launch", "--slurm", "--", "train", "resume=never"]) == 2
    assert "resume=never cannot be used with a cluster job" in capsys.readouterr().err
