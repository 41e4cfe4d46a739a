"""Groups of processes that train in turns, and how they are told; see ddp_scaling.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CONTROL = "DDP_SCALING_CONTROL"
"""The folder with a pipe for each process, and one for what they tell."""


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        batch: samples of each process.
        steps: steps of a turn.
    """

    batch: int
    steps: int


CASES = {"mlp": Case(batch=512, steps=6), "cnn": Case(batch=64, steps=6)}
WIDTHS = (784, 1024, 1024, 10)
IMAGE, CHANNELS = 32, (3, 32, 64, 64)
"""The images have as many rows as columns; each convolution halves them."""


class Group:
    """The processes of one side that train together when they are told to.

    Args:
        side: ``meshwright`` or ``torch``.
        case: the name of the case.
        count: the number of processes.
        folder: a folder for its pipes and its log.
        python: the interpreter of the other side.
    """

    def __init__(self, side: str, case: str, count: int, folder: Path, *, python: str) -> None:
        self._case, self._count, self._folder = case, count, folder
        self._command = _command(side, case, count, python)

    def __enter__(self) -> Group:
        self._folder.mkdir(parents=True)
        names = [*(f"go-{rank}" for rank in range(self._count)), "told"]
        for name in names:
            os.mkfifo(self._folder / name)
        # Opened for both directions, so that opening does not wait for the other end.
        self._go = [open_pipe(self._folder / name) for name in names[:-1]]
        self._told = open_pipe(self._folder / "told")
        self._log = (self._folder / "log").open("w")
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **single, CONTROL: str(self._folder), "JAX_PLATFORMS": "cpu"},
        )
        self._read()
        return self

    def take_turn(self) -> float:
        """Let it train for a turn, and return the samples per second of all its processes."""
        case = CASES[self._case]
        self._say("go")
        seconds = self._read()["seconds"]
        return case.batch * self._count * case.steps / seconds

    def __exit__(self, *_: object) -> None:
        self._say("end")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
        for pipe in (*self._go, self._told, self._log):
            pipe.close()

    def _say(self, word: str) -> None:
        for pipe in self._go:
            pipe.write(f"{word}\n".encode())

    def _read(self) -> dict[str, Any]:
        line = self._told.readline()
        while not line.startswith(b"{"):
            line = self._told.readline()
        told = json.loads(line)
        if "failed" in told:
            raise RuntimeError(f"{told['failed']}\n{(self._folder / 'log').read_text()[-3000:]}")
        return told


def _command(side: str, case: str, count: int, python: str) -> list[str]:
    own = str(Path(__file__).with_name(f"ddp_{side}.py"))
    if side == "meshwright":
        if count == 1:
            return [sys.executable, own, case]
        return [sys.executable, "-m", "meshwright.launch", f"--nprocs={count}", own, case]
    if count == 1:
        return [python, own, case]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={count}", own, case]


def open_pipe(path: Path) -> IO[bytes]:
    """Open a named pipe without a buffer."""
    return os.fdopen(os.open(path, os.O_RDWR), "r+b", buffering=0)


class Turns:
    """The side of a process: it waits to be told, and tells how long its turn took.

    The process gets a core of its own before any library counts cores.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        folder = Path(os.environ[CONTROL])
        # For reading only, so that it ends when nobody is left who could tell it to go.
        self._go = (folder / f"go-{self.rank}").open("rb", buffering=0)
        self._told = open_pipe(folder / "told")

    def tell(self, **values: Any) -> None:
        """Tell something; only process 0 does."""
        if self.rank == 0:
            self._told.write(json.dumps(values).encode() + b"\n")

    def told_to_go(self) -> bool:
        """Wait for the next turn; false at the end."""
        return self._go.readline().strip() == b"go"
