"""Disturbs a training for minutes, and compares it with one that nothing has happened to.

Three processes train under `meshwright launch --restarts`, while random ones of them are killed
(SIGKILL), paused (SIGSTOP, and SIGCONT after up to six seconds) or preempted (SIGTERM, after which
the same command is launched again). At the end the run is stopped, and an undisturbed run of as
many steps must have the same losses and parameters, bit for bit.

    python benchmarks/soak.py [--minutes 5] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from record import write_record

import meshwright as mw

PROCESSES = 3
TRAINING = (
    *("train", "model=mlp", "model.widths=[784,384,384,10]", "optimizer=adamw"),
    *("optimizer.schedule=constant", "training.global_batch_size=48", f"mesh.fsdp={PROCESSES}"),
    *("mesh.data=1", "checkpoint.every=50", "tracking.log_every=1"),
)
PAUSE_SECONDS = (0.3, 6.0)
TRAINING_SECONDS = (1.0, 20.0)
"""How long a run trains before the next fault."""
EARLY, EARLY_SECONDS = 0.2, (0.0, 8.0)
"""The share of faults that hit a run while it starts."""
STOPPED, GRACE_SECONDS, START_SECONDS = 75, 180.0, 300.0


@dataclass
class Soak:
    """A training that is disturbed.

    Attributes:
        folder: the working directory.
        chance: chooses the faults.
        faults: how often each signal was sent.
        exits: how often a launch ended with each exit code.
        restarts: how often launches started their processes again.
    """

    folder: Path
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter[str])
    exits: Counter[int] = field(default_factory=Counter[int])
    restarts: int = 0

    def run(self, seconds: float) -> float:
        """Train for this long and return the seconds it took, with the last save."""
        started = time.monotonic()
        self._launch()
        early = True
        while time.monotonic() - started < seconds:
            # Never two of them in a row: three starts without progress would end the launch.
            early = not early and self.chance.random() < EARLY
            if not early:
                self._wait_for_steps()
            self._watch(self.chance.uniform(*(EARLY_SECONDS if early else TRAINING_SECONDS)))
            if time.monotonic() - started < seconds:
                self._disturb()
        self._wait_for_steps()
        self._launcher.send_signal(signal.SIGTERM)
        self._launcher.wait(GRACE_SECONDS)
        self._ended()
        return time.monotonic() - started

    def _wait_for_steps(self) -> None:
        file = self.folder / "run/metrics.jsonl"
        before, until = _size(file), time.monotonic() + START_SECONDS
        while _size(file) == before:
            assert time.monotonic() < until, (self.folder / "stderr").read_text(errors="replace")
            self._watch(0.2)

    def _watch(self, seconds: float) -> None:
        """Wait, and launch again what has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._launcher.poll() is not None:
                self._ended()
                self._launch()
            time.sleep(0.1)

    def _launch(self) -> None:
        self._launcher = launch(self.folder, "--restarts=1000", "training.steps=1000000")

    def _ended(self) -> None:
        self.exits[self._launcher.returncode] += 1
        text = (self.folder / "stderr").read_text(errors="replace")
        self.restarts = len(re.findall(r"^launch: .*; restart \d+ of", text, re.MULTILINE))

    def _disturb(self) -> None:
        workers = workers_of(self._launcher.pid)
        if not workers:
            return
        pid = self.chance.choice(workers)
        name = self.chance.choices(["SIGKILL", "SIGSTOP", "SIGTERM"], [5, 3, 2])[0]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[name])
            self.faults[name] += 1
            if name == "SIGSTOP":
                time.sleep(self.chance.uniform(*PAUSE_SECONDS))
                os.kill(pid, signal.SIGCONT)


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Launch the training in a folder."""
    flags = [word for word in words if word.startswith("--")]
    settings = [word for word in words if not word.startswith("--")]
    start = [sys.executable, "-m", "meshwright", "launch", f"--nprocs={PROCESSES}", *flags, "--"]
    with (folder / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [*start, *TRAINING, "hydra.run.dir=run", *settings],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )


def workers_of(launcher: int) -> list[int]:
    """Return the processes that a launcher has started, in order."""
    found: dict[int, int] = {}
    for text in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            environ = Path(f"/proc/{text}/environ").read_bytes()
            if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", environ):
                found[int(rank[1])] = int(text)
    return [found[rank] for rank in sorted(found)]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, as it was done last."""
    # A killed process may have left half a line.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row for row in rows if row["split"] == "train"}


def compare(disturbed: Path, undisturbed: Path, last: int) -> dict[str, bool]:
    """Return whether two runs have the same losses and parameters, bit for bit."""
    one, other = steps_of(disturbed), steps_of(undisturbed)
    params, expected = (mw.read_params(run, step=last) for run in (disturbed, undisturbed))
    losses = [[rows[step]["loss"] for step in range(1, last + 1)] for rows in (one, other)]
    return {
        "losses": losses[0] == losses[1],
        "parameters": params.keys() == expected.keys()
        and all(np.array_equal(params[path], expected[path]) for path in params),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, calm = Path(name, "disturbed"), Path(name, "undisturbed")
        folder.mkdir()
        calm.mkdir()
        soak = Soak(folder, random.Random(asked.seed))
        seconds = soak.run(60 * asked.minutes)
        steps = steps_of(folder / "run")
        last = max(int(path.name) for path in folder.glob("run/checkpoints/*[0-9]"))
        assert launch(calm, f"training.steps={last}").wait() == 0, (calm / "stderr").read_text()
        same = compare(folder / "run", calm / "run", last)
    # The last step before a stop is not timed.
    useful = sum(row.get("step_seconds", 0.0) for step, row in steps.items() if step <= last)
    figures = {
        "minutes": round(seconds / 60, 1),
        "updates": last,
        "faults": dict(sorted(soak.faults.items())),
        "launches": sum(soak.exits.values()),
        "restarts": soak.restarts,
        "exit_codes": {str(code): count for code, count in sorted(soak.exits.items())},
        "goodput": round(useful / seconds, 3),
        "targets": {
            "losses and parameters equal to an undisturbed run, bit for bit": "met"
            if all(same.values())
            else f"missed: {same}",
            "launches end with exit code 75 only, after a SIGTERM": "met"
            if set(soak.exits) == {STOPPED}
            else "missed",
        },
    }
    print(figures)
    write_record("soak", figures)


if __name__ == "__main__":
    main()
