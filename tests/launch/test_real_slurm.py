"""`launch --slurm` on a real SLURM of two nodes: killed and preempted jobs resume bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_slurm import LoopbackSlurm, loopback_slurm

pytestmark = pytest.mark.faults

STEPS = 60
TRAINING = [
    *("train", "model=gpt2_nano", "model.num_blocks=1", "model.context_length=16"),
    *("mesh.data=2", "data=synthetic", f"training.steps={STEPS}", "training.sample_tokens=0"),
    *("checkpoint.every=5", "tracking.log_every=1"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with loopback_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def meshwright(*words: str, cwd: Path, environ=None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    meshwright("launch", "--nprocs", "2", "--", *TRAINING, "hydra.run.dir=run", cwd=folder)
    return losses(folder / "run")


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step; those that were done twice must agree."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if values["split"] == "train":
            assert found.setdefault(values["step"], values["loss"]) == values["loss"]
    return found


def submit(slurm: LoopbackSlurm, folder: Path) -> tuple[str, Path, Path]:
    """Submit the training, and return its job, its run folder and its log once it trains."""
    # A name with which a script that quotes too little fails.
    folder = folder / 'it\'s a "folder"'
    folder.mkdir()
    flags = ["--slurm", "--nodes", "2", "--nprocs", "1", "--time", "1:00:00"]
    printed = meshwright("launch", *flags, "--", *TRAINING, cwd=folder, environ=slurm.environ)
    job, log, run = re.fullmatch(
        r"submitted SLURM job (\d+)\nlog: (.+)\nrun folder: (.+)\n", printed
    ).groups()
    slurm.wait_for((Path(run) / "checkpoints/5").exists, "the first checkpoint", 180)
    return job, Path(run), Path(log)


def finish(slurm: LoopbackSlurm, job: str, log: Path) -> str:
    slurm.start_soon(job)
    done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    slurm.wait_for(lambda: slurm.job(job)["JobState"] in done, "the job has ended", 240)
    text = log.read_text()
    assert slurm.job(job)["JobState"] == "COMPLETED", text
    assert slurm.job(job)["Restarts"] == "1", text
    return text


def worker_of(job: str, rank: str) -> int:
    """Return the id of the Python process with this number."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()} <= set(environ)
        if own and words[0] == sys.executable.encode() and b"train" in words:
            return int(folder.name)
    raise AssertionError(f"no process {rank} of job {job}")


def test_a_killed_process_requeues_the_job_which_resumes_bit_for_bit(slurm, undisturbed, tmp_path):
    job, run, log = submit(slurm, tmp_path)
    os.kill(worker_of(job, "1"), signal.SIGKILL)
    text = finish(slurm, job, log)
    assert f"exit code 137: job {job} is requeued, restart 1 of 3" in text
    assert "resume: continuing after step" in text
    assert losses(run) == undisturbed
    assert len(undisturbed) == STEPS


def test_the_signal_before_the_time_limit_saves_and_requeues(slurm, undisturbed, tmp_path):
    job, run, log = submit(slurm, tmp_path)
    slurm.call("scancel", "--signal=USR1", job)
    slurm.wait_for(lambda: "preempted: job" in log.read_text(), "the job is preempted")
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    text = finish(slurm, job, log)
    assert "SIGUSR1 asked to stop" in text
    assert f"resume: continuing after step {saved}, from" in text
    assert not list(run.glob("slurm-*.failures"))
    assert losses(run) == undisturbed


def test_a_mistake_is_not_requeued(slurm, tmp_path):
    (tmp_path / "own.py").write_text("import sys; sys.exit(2)")
    flags = ["--slurm", "--nodes", "2", "--nprocs", "1"]
    printed = meshwright("launch", *flags, "own.py", cwd=tmp_path, environ=slurm.environ)
    job = printed.split()[3]
    slurm.wait_for(lambda: slurm.job(job)["JobState"] == "FAILED", "the job has failed")
    assert slurm.job(job)["ExitCode"] == "2:0"
    assert slurm.job(job)["Restarts"] == "0"
