"""Going on with fewer processes or machines: who is given up, on which mesh, with which samples."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import pytest
from real_processes import free_port

from meshwright.cli.main import main
from meshwright.errors import ExitCode, UserError
from meshwright.launch.options import parse_launch
from meshwright.launch.supervise import Outcome, Requests
from meshwright.launch.team import MachinesLeft, ProcessesLeft
from meshwright.launch.watch import Watch
from meshwright.launch.whole_run import find_run
from meshwright.runtime.attempts import PROCESS_RANGE, Fit, ProcessRange

LIMIT_SECONDS = 600
SMALL = ("model=mlp", "model.widths=[784,16,10]", "optimizer=sgd", "training.global_batch_size=24")
OFTEN = (
    "checkpoint.every=3",
    "tracking.log_every=1",
    "training.eval_every=100",
    "training.steps=10",
)


def outcome(code: int, rank: int | None, fits: dict[int, Fit] | None = None) -> Outcome:
    watch = Watch({n: Path("missing") for n in range(8)})
    return Outcome(code, False, "it failed", None, watch, rank, fits or {})


def team(*flags: str) -> ProcessesLeft:
    options = parse_launch([*flags, "--", "train"])
    left = ProcessesLeft(options, {}, find_run(options, {}))
    left.gather(Requests())
    return left


def used(left: ProcessesLeft) -> list[int]:
    gathered = left.gather(Requests())
    assert gathered is not None
    assert gathered.run.world_size == len(gathered.places)
    return list(gathered.places)


def test_a_process_is_given_up_after_two_tries_without_progress():
    left = team("--nprocs=4", "--min-procs=2")
    for progress in (False, False, True, False):
        assert left.after(outcome(9, 3), progress=progress) is None
    change = left.after(outcome(9, 3), progress=False)
    assert change is not None
    assert change.text == (
        "process 3 did not come back after 2 tries; "
        "continuing with 3 of 4 processes (--min-procs 2)"
    )
    assert used(left) == [0, 1, 2]


def test_a_number_without_a_mesh_is_passed_over_and_its_processes_replace_others():
    left = team("--nprocs=4", "--min-procs=2")
    fits = {4: Fit("fsdp=4"), 3: Fit(problem="24 is no multiple of 3"), 2: Fit("fsdp=2")}
    for _ in range(3):
        change = left.after(outcome(9, 0, fits), progress=False)
    assert change is not None
    assert change.text.endswith(
        "continuing with 2 of 4 processes (--min-procs 2) on mesh fsdp=2, because there is no mesh "
        "for 3 processes: 24 is no multiple of 3"
    )
    assert used(left) == [1, 2]
    for _ in range(3):
        left.after(outcome(9, 0, fits), progress=False)
    assert used(left) == [2, 3]
    for _ in range(3):
        change = left.after(outcome(9, 1), progress=False)
    assert change is not None
    assert change.ends
    assert change.code is None
    assert change.text.endswith("1 process left, fewer than --min-procs 2")


def test_it_ends_if_no_number_has_a_mesh():
    left = team("--nprocs=3", "--min-procs=2")
    for _ in range(3):
        change = left.after(outcome(9, 1, {2: Fit(problem="5 is odd")}), progress=False)
    assert change is not None
    assert (change.ends, change.code) == (True, ExitCode.NOTHING_FITS)
    assert change.text.endswith(
        "2 processes left, and --min-procs 2, but no mesh for 2 processes: 5 is odd"
    )


def test_failures_of_different_processes_are_not_added_up():
    left = team("--nprocs=2", "--min-procs=1")
    for rank in (0, 1, 0, 1, None, 1):
        assert left.after(outcome(9, rank), progress=False) is None
    assert used(left) == [0, 1]


def test_a_machine_leaves_whose_process_does_not_come_back():
    words = "--nprocs 2 --nodes 3 --min-nodes 2 --coordinator 127.0.0.1:7000 --node-rank"
    options = parse_launch([*words.split(), "1", "--", "train"])
    left = MachinesLeft(options, {}, find_run(options, {}), print)
    assert left.allowed == ProcessRange(6, 4, 2)
    assert list(ProcessRange(6, 4, 2).counts) == [6, 4]
    for rank in (2, None, 2, 2):
        assert left.after(outcome(9, rank), progress=False) is None
    change = left.after(outcome(9, 2), progress=False)
    assert change is not None
    assert change.ends
    assert "process 2 did not come back after 2 tries; this machine leaves the run" in change.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nprocs 2 --min-procs 3", "--min-procs 3 is more than --nprocs 2"),
        ("--nprocs 2 --min-procs 0", "--min-procs 0 is not valid"),
        ("--nprocs 2 --min-nodes 1", "--min-nodes is for several machines"),
        ("--nprocs 2 --nodes 2 --min-procs 1", "--min-procs is for one machine"),
        ("--nprocs 2 --nodes 2 --min-nodes 3", "--min-nodes 3 is more than --nodes 2"),
        ("--nprocs 2 --min-procs 1 --restarts 0", "--restarts 0 contradicts --min-procs"),
        ("--slurm --min-nodes 1", "--min-nodes cannot be used with a cluster job"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_launch([*words.split(), "--", "doctor"])


@pytest.mark.full
def test_fewer_processes_are_started_if_one_does_not_come_back(tmp_path):
    script = """
        import os, sys
        rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if rank == "1" and count == "3":
            sys.exit(9)
        if count == "3":
            import time
            time.sleep(600)
        own = os.environ["LOCAL_RANK"], count, os.environ["LOCAL_WORLD_SIZE"]
        print(rank, *own, file=sys.stderr)
    """
    (tmp_path / "work.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [*words("meshwright.launch"), "--nprocs=3", "--min-procs=2", "work.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "launch: process 1 did not come back after 2 tries; continuing with 2 of 3 processes "
        "(--min-procs 2)\n" in done.stderr
    )
    assert sorted(re.findall(r"\[\d\] (\d \d 2 2)", done.stderr)) == ["0 0 2 2", "1 1 2 2"]


@pytest.mark.parametrize(
    "code", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_a_mistake_ends_the_run_however_few_processes_are_enough(tmp_path, code):
    (tmp_path / "work.py").write_text(
        f"import os, sys, time\nsys.exit({code}) if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    done = subprocess.run(
        [*words("meshwright.launch"), "--nprocs=2", "--min-procs=1", "work.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == code
    assert "going on" not in done.stderr
    assert "restart 1" not in done.stderr


def test_a_run_says_that_it_goes_on_with_fewer_from_its_beginning(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(PROCESS_RANGE, ProcessRange(2, 1).to_environment()[PROCESS_RANGE])
    devices = 2 * jax.device_count()
    own = [f"mesh.data={devices}", "training.global_batch_size=16", "training.steps=1"]
    own += ["data.eval_fraction=0"]
    assert main(["train", *SMALL, *own, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert (
        f"processes: continuing with 1 of 2 processes on data={devices // 2}; the samples stay the "
        "same: 16 = 2 per device × 8 replicas × 1 microbatch\n" in capfd.readouterr().err
    )


def words(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def start(folder: Path, launch: tuple[str, ...], *settings: str) -> subprocess.Popen[str]:
    """Start training in processes that import `fault.py` of the folder."""
    command = [*words("meshwright"), *(("launch", *launch, "--") if launch else ()), "train"]
    return subprocess.Popen(
        [*command, *SMALL, *OFTEN, f"hydra.run.dir={folder / 'run'}", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])},
    )


def finish(started: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = started.communicate(timeout=LIMIT_SECONDS)
    finally:
        started.kill()
    return started.returncode, err


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    return {row["step"]: row["loss"] for row in rows if row["split"] == "train"}


def assert_same_losses(folder: Path, expected: dict[int, float]) -> None:
    found = losses(folder)
    assert sorted(found) == sorted(expected)
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one process with one device, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, err = finish(start(folder, (), "simulate=1"))
    assert code == 0, err
    return losses(folder)


GONE = """
import os, signal, time
from pathlib import Path
import meshwright as mw

RANK, COUNT = os.environ["RANK"], os.environ["WORLD_SIZE"]
if COUNT == "FULL" and RANK == "1" and Path("gone").exists():
    os._exit(7)  # As a process whose device is gone.

class Fault(mw.Callback):
    def on_log(self, step, metrics):
        if step == 8 and COUNT == "FULL" and RANK == "1":
            time.sleep(1)  # The checkpoint of step 6 gets written.
            Path("gone").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
@pytest.mark.faults
@pytest.mark.parametrize(
    ("full", "settings", "count", "mesh"),
    [
        (4, ("simulate=4", "mesh.fsdp=4"), 2, {"fsdp": 2}),
        (3, ("simulate=3", "mesh.data=3", "training.micro_batch_size=4"), 2, {"data": 2}),
        (2, ("simulate=4", "mesh.data=2", "mesh.tensor=2"), 1, {"tensor": 2}),
    ],
)
def test_training_goes_on_with_the_same_losses(tmp_path, expected, full, settings, count, mesh):
    (tmp_path / "fault.py").write_text(GONE.replace("FULL", str(full)))
    launch = (f"--nprocs={full}", f"--min-procs={count}")
    own = (*settings, "training.callbacks=[fault:Fault]")
    code, err = finish(start(tmp_path, launch, *own))
    assert code == 0, err
    shown = "".join(f" on mesh {axis}={size}" for axis, size in mesh.items())
    assert (
        f"launch: process 1 did not come back after 2 tries; continuing with {count} of {full} "
        f"processes (--min-procs {count}){shown}" in err
    )
    assert f"[0] processes: continuing with {count} of {full} processes on " in err
    assert_same_losses(tmp_path, expected)
    run = tmp_path / "run"
    assert json.loads((run / "run.json").read_text())["mesh"] == mesh
    result = json.loads((run / "result.json").read_text())
    assert result["attempts"] == 4
    assert 0 < result["goodput"] < 1
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    (event,) = [event for event in events if event["kind"] == "processes"]
    assert (event["processes"], event["mesh"], event["step"]) == (count, mesh, 6)
    assert f"continuing with {count} of {full} processes" in event["message"]


@pytest.mark.full
@pytest.mark.faults
def test_a_process_that_never_comes_is_left_out_from_the_beginning(tmp_path, expected):
    fault = """
        import os
        import meshwright as mw
        if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1":
            os._exit(7)
        class Fault(mw.Callback):
            pass
    """
    (tmp_path / "fault.py").write_text(textwrap.dedent(fault))
    own = ("mesh.data=2", "training.callbacks=[fault:Fault]")
    code, err = finish(start(tmp_path, ("--nprocs=2", "--min-procs=1"), *own))
    assert code == 0, err
    assert (
        "[0] processes: continuing with 1 of 2 processes on 1 device; the samples stay the same: "
        "24 = 24 per device × 1 replica × 1 microbatch\n" in err
    )
    assert_same_losses(tmp_path, expected)


SCRIPT = """
import os, sys
import numpy as np
import optax
from flax import nnx
import meshwright as mw
from meshwright.distributed import setup_multinode

setup_multinode()
count = os.environ.get("WORLD_SIZE", "1")

class Gone(mw.Callback):
    def on_log(self, step, metrics):
        if count == "2" and os.environ["RANK"] == "0":
            os._exit(9)

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

numbers = np.random.default_rng(0)
data = {
    "x": numbers.normal(size=(64, 4)).astype("float32"),
    "y": numbers.normal(size=(64, 2)).astype("float32"),
}
trainer = mw.Trainer(
    model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
    loss=loss,
    optimizer=optax.sgd(0.1),
    mesh=sys.argv[1],
    log_every=1,
)
result = trainer.fit(data, batch_size=8, steps=4, callbacks=[Gone()])
print(result.assembled.plan.mesh, [f"{x:.5f}" for x in result.losses.values()])
"""


@pytest.mark.full
@pytest.mark.faults
def test_a_script_goes_on_with_the_same_losses(tmp_path):
    (tmp_path / "work.py").write_text(SCRIPT)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    plain = subprocess.run(
        [sys.executable, "work.py", ""],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=tmp_path,
        env=env,
    )
    command = [*words("meshwright.launch"), "--nprocs=2", "--min-procs=1", "work.py", "fsdp=2"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "continuing with 1 of 2 processes (--min-procs 1) on 1 device" in done.stderr
    assert plain.stdout.startswith("{} ['"), plain.stderr
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


@pytest.mark.full
@pytest.mark.faults
def test_a_machine_that_is_lost_is_noticed_and_the_other_goes_on(tmp_path, expected):
    fault = """
        import os, signal, time
        from pathlib import Path
        import meshwright as mw

        class Fault(mw.Callback):
            def on_log(self, step, metrics):
                if step == 8 and os.environ["RANK"] == "1":
                    time.sleep(1)
                    Path("pids").write_text(f"{os.getppid()} {os.getpid()}")
                    # Nothing of the machine answers any more, and no connection is closed.
                    os.kill(os.getppid(), signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGSTOP)
    """
    (tmp_path / "fault.py").write_text(textwrap.dedent(fault))
    flags = (f"--coordinator=127.0.0.1:{free_port()}", "--min-nodes=1", "--join-timeout=20")
    flags = (*flags, "--lost-timeout=5")
    settings = ("simulate=2", "mesh.fsdp=2", "training.callbacks=[fault:Fault]")
    machines = [
        start(tmp_path, ("--nprocs=1", "--nodes=2", f"--node-rank={n}", *flags), *settings)
        for n in (0, 1)
    ]
    try:
        noticed = _seconds_to_notice(machines[0], tmp_path / "pids")
        code, err = finish(machines[0])
    finally:
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            os.kill(pid, signal.SIGKILL)
        finish(machines[1])
    assert code == 0, err
    assert noticed < 15
    assert (
        "launch: machine 1 did not come back; continuing with 1 of 2 machines (--min-nodes 1) on 1 "
        "device\n" in err
    )
    assert_same_losses(tmp_path, expected)


def _seconds_to_notice(launcher: subprocess.Popen[str], stopped: Path) -> float:
    """Return how long the launcher of the other machine took to name the lost process."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if re.match(r"launch: process 0 lost process 1 at step \d+; restart 1 of 10", line):
            return time.time() - stopped.stat().st_mtime
    raise AssertionError("not noticed")
