"""A real SLURM of two nodes on the loopback interface, started in a folder of its own."""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from real_processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

_CONFIG = """\
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class LoopbackSlurm:
    """Commands for the cluster that `loopback_slurm` has started.

    Attributes:
        environ: the variables with which SLURM's programs find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Run a program of SLURM and return what it prints."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows about a job."""
        text = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def start_soon(self, number: str) -> None:
        """Start a requeued job in a few seconds: SLURM would wait for two minutes.

        In the second of the requeue, slurmd still refuses the job as one that was ended.
        """
        self.wait_for(lambda: self.job(number)["JobState"] == "PENDING", "the job is requeued")
        self.call("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
        """Wait until a condition holds, and fail with the cluster's logs if it does not."""
        until = time.monotonic() + seconds
        while not condition():
            logs = [f"{path}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log")]
            assert time.monotonic() < until, "\n".join([f"{what}: not within {seconds} s", *logs])
            time.sleep(0.1)


@contextmanager
def loopback_slurm(folder: Path) -> Generator[LoopbackSlurm]:
    """Start munged, slurmctld and two slurmd; end them, and what they started, afterwards."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} not found: run `make slurm`"
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "state").mkdir(parents=True)
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(_CONFIG.format(user=user, ports=ports, folder=folder))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    slurm = LoopbackSlurm(folder)
    munge = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE_FILES.items()]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_start(slurm, "munged", "--foreground", "--force", *munge))
        slurm.wait_for((folder / "munge.socket").exists, "munged listens")
        running.append(_start(slurm, "slurmctld", "-D"))
        running += [_start(slurm, "slurmd", "-D", "-N", name) for name in ("node1", "node2")]
        slurm.wait_for(lambda: _is_ready(slurm), "both nodes are idle")
        yield slurm
    finally:
        _end(slurm, running)


_MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "messages",
    "seed-file": "seed",
}


def _start(slurm: LoopbackSlurm, *command: str) -> subprocess.Popen[bytes]:
    name = f"{command[0]}-{command[-1]}" if command[0] == "slurmd" else command[0]
    with (slurm.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=slurm.environ, stdout=log, stderr=log)


def _is_ready(slurm: LoopbackSlurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=slurm.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout.split() == ["idle", "idle"]


def _end(slurm: LoopbackSlurm, running: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the jobs, so that their processes end too, and then the daemons, each by its id."""
    if len(running) == 4:
        call = subprocess.run
        settings = {"env": slurm.environ, "capture_output": True, "timeout": 30, "check": False}
        jobs = call(["squeue", "--noheader", "--format=%i"], text=True, **settings).stdout.split()
        if jobs:
            call(["scancel", *jobs], **settings)
            until = time.monotonic() + 30
            while call(["squeue", "--noheader"], **settings).stdout and time.monotonic() < until:
                time.sleep(0.2)
    for process in reversed(running):
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
