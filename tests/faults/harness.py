"""Launches runs as a user would, disturbs them, and checks what must hold after any fault."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint import CheckpointReader
from meshwright.drill.process import Instructions

LIMIT_SECONDS = 600
"""No launch takes this long, even on a machine that is very busy with other things."""
STEPS = 10
EVERY = 3
"""Steps between two checkpoints."""
RUN = "run"
"""The run folder, in the folder of a test."""
MARK = "MESHWRIGHT_FAULT_TEST"
"""An environment variable by which all processes of a launch are found."""

OWN = Path(__file__).with_name("own_training.py").read_text()
"""The file ``own.py`` in the folder of a test: a model, a loss and data."""
FOR_FAULTS = "import ctypes, os, signal, sys, time\nimport meshwright as mw\n"
"""What the code of faults needs in addition."""

TRAINING = (
    *("model.kind=own:Net", "task.kind=own:loss", "data.kind=own:data", "optimizer.kind=adamw"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.learning_rate=0.01"),
    *("training.global_batch_size=12", "tracking.log_every=1", f"hydra.run.dir={RUN}"),
    *("sharding.min_shard_size=0", f"checkpoint.every={EVERY}"),
)
"""A small model whose parameters and optimizer state are sharded over all processes."""

_FAILURE = re.compile(r"^(\[\d+\] )?error: |lost its conn|Gloo|UNAVAILABLE|being terminated")
"""A failure, or what others say because of it."""
_TIMES = (
    *("time", "step_seconds", "samples_per_second", "tokens_per_second", "flops_per_second"),
    "input_wait_share",
)


@dataclass
class Launch:
    """A launch, running or ended.

    Attributes:
        folder: its working directory.
        process: the launcher.
        mark: marks the environment of all its processes.
        lines: what it has printed to stderr so far, with the seconds since it started.
    """

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    lines: list[tuple[float, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._readers = [threading.Thread(target=self._read, daemon=True)]
        self.out = ""
        self._readers.append(threading.Thread(target=self._read_out, daemon=True))
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic() - self.started, line.rstrip("\n")))

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        self.out = self.process.stdout.read()

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / RUN

    @property
    def err(self) -> str:
        """What was printed to stderr so far."""
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, seconds: float = 300) -> re.Match[str]:
        """Wait until a line of stderr matches, and return the match."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _, line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert self._readers[0].is_alive(), f"no line matches {pattern!r}:\n{self.err}"
            time.sleep(0.02)
        raise AssertionError(f"no line matches {pattern!r} after {seconds} s:\n{self.err}")

    def seconds_between(self, first: str, last: str) -> float:
        """Return the seconds between the first lines that match two patterns."""
        at = [next(t for t, line in self.lines if re.search(p, line)) for p in (first, last)]
        return at[1] - at[0]

    def workers(self) -> dict[int, int]:
        """Return the processes that train now, by number."""
        found = {}
        for pid in marked(self.mark):
            environ = environ_of(pid)
            if "RANK" in environ and pid != self.process.pid:
                found[int(environ["RANK"])] = pid
        return found

    def finish(self, seconds: float = LIMIT_SECONDS) -> "Launch":
        """Wait for the end; nothing may be left running, and nothing committed may be lost."""
        try:
            self.process.wait(seconds)
            for reader in self._readers:
                reader.join(seconds)
        finally:
            self.kill()
        self.check_nothing_left()
        return self

    def check_nothing_left(self, seconds: float = 20) -> None:
        """No process of the launch may be left, and every logged checkpoint is still there."""
        until = time.monotonic() + seconds
        while left := marked(self.mark):
            assert time.monotonic() < until, f"left running: {left}\n{self.err}"
            time.sleep(0.05)
        logged = [e["step"] for e in events(self.run) if e["kind"] == "checkpoint"]
        listed = checkpoints(self.run)
        assert not logged or max(logged) <= max(listed, default=-1), (logged, listed)

    def kill(self) -> None:
        """End the launcher, whose processes end with it."""
        self.process.kill()
        self.process.wait()

    @property
    def code(self) -> int:
        """The exit code."""
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def first_error(self) -> str:
        """The first line that speaks of a failure, which must be an error."""
        line = next((line for _, line in self.lines if _FAILURE.search(line)), "")
        assert re.match(r"(\[\d+\] )?error: ", line), self.err
        return line


def launch(
    folder: Path,
    *flags: str,
    nprocs: int = 2,
    words: Sequence[str] = (),
    steps: int = STEPS,
    own: str = "",
    code: str = "",
    fault: str = "",
    at: int = 5,
    environ: dict[str, str] | None = None,
) -> Launch:
    """Start a run with `meshwright launch`.

    Args:
        folder: the working directory.
        flags: those of ``launch``.
        nprocs: the processes.
        words: further settings of ``train``.
        steps: the steps.
        own: Python code after the model, loss and data.
        code: the body of ``on_log(self, step, metrics)`` of a callback.
        fault: a fault of `meshwright drill` to inject, which is made as there.
        at: the step at which to inject it.
        environ: further environment variables.
    """
    callback = ""
    if code:
        body = textwrap.indent(textwrap.dedent(code).strip("\n"), " " * 8)
        callback = f"class Fault(mw.Callback):\n    def on_log(self, step, metrics):\n{body}\n"
        words = (*words, "training.callbacks=[own:Fault]")
    (folder / "own.py").write_text(f"{OWN}\n{FOR_FAULTS}\n{textwrap.dedent(own)}\n{callback}")
    mesh = ("mesh.data=1", f"mesh.fsdp={nprocs}")
    command = ("train", *TRAINING, *mesh, f"training.steps={steps}", *words)
    if fault:
        notes = folder / "notes"
        notes.mkdir(exist_ok=True)
        given = Instructions(fault, str(notes), str(folder / RUN), step=at, every=EVERY)
        environ = {**(environ or {}), **given.to_environment()}
        command = ("-m", "meshwright.drill.worker", *command)
    return start(folder, f"--nprocs={nprocs}", *flags, "--", *command, environ=environ)


def start(folder: Path, *words: str, environ: dict[str, str] | None = None) -> Launch:
    """Start `meshwright launch` with these words."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "launch", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)]),
            **(environ or {}),
            MARK: mark,
        },
    )
    return Launch(folder, process, mark)


def marked(mark: str) -> list[int]:
    """Return the living processes whose environment has the mark."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if environ_of(pid).get(MARK) == mark]


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment a process started with; empty for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """Return what was computed in each step; those that were done again must agree."""
    found: dict[int, dict[str, float]] = {}
    for row in _lines(run / "metrics.jsonl"):
        if row.pop("split") != "train":
            continue
        step = row.pop("step")
        values = {name: value for name, value in row.items() if name not in _TIMES}
        assert found.setdefault(step, values) == values, f"step {step} came out differently"
    return found


def events(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return _lines(run / "events.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    # A killed process may have left half a line.
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def checkpoints(run: Path) -> list[int]:
    """Return the steps of the checkpoints that are listed."""
    return CheckpointReader(run / "checkpoints").steps()


def read_all(run: Path) -> dict[int, Any]:
    """Read all checkpoints of a run, comparing their checksums."""
    reader = CheckpointReader(run / "checkpoints")
    return {step: reader.read(step, reader.shapes(step)) for step in reader.steps()}


def stop_ignoring_interrupts() -> None:
    """Let started processes get Ctrl-C; those of a shell's background job would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
