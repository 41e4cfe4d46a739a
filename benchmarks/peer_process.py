"""Processes that train in turns, and how they talk with the one that compares them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peer_cases import Case

MARK = "@measured "
BEGAN = "GPU_PEERS_BEGAN"
TURNS = "GPU_PEERS_TURNS"
STEPS = "GPU_PEERS_STEPS"
SECONDS = "GPU_PEERS_SECONDS"
"""How long a turn lasts at least; the clock is read every few steps."""
PEERS = Path(__file__).with_name("gpu_peers.py")
PEER_PYTHON = "PEER_PYTHON"
"""Names an interpreter that has PyTorch, if this one has not."""


class Worker:
    """A process that trains when it is told to.

    Args:
        side: ``meshwright``, with further settings after a colon, ``transformers`` or
            ``torchvision``.
        name: the case.
        data: the path of its data.
        steps: steps of a turn, or between two looks at the clock.
        seconds: how long a turn lasts at least.
        script: what it runs.
    """

    def __init__(
        self,
        side: str,
        name: str,
        data: Path,
        steps: int,
        *,
        seconds: float = 0.0,
        script: Path = PEERS,
    ) -> None:
        ours = side.split(":")[0] == "meshwright"
        python = sys.executable if ours else os.environ.get(PEER_PYTHON, sys.executable)
        command = [python, str(script), "--worker", side, name, str(data), "--steps", str(steps)]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", BEGAN: str(time.time())}
        env[SECONDS] = str(seconds)
        words = "".join(c if c.isalnum() else "_" for c in f"{name}_{side}")
        self.log = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"{words}.log"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"),
            text=True, env=env,
        )  # fmt: skip
        self.turns: list[dict[str, Any]] = []
        self._first: float | None = None

    @property
    def first(self) -> float:
        """How long it took from its start to the end of its first step; waits for that."""
        if self._first is None:
            self._first = self._read()["first_update"]
        return self._first

    def take_turn(self) -> None:
        """Let it train for one turn."""
        assert self.first, "it has to be trained once before"
        began = time.time()
        self._say("go")
        self.turns.append({**self._read(), "began": began, "ended": time.time()})

    def figures(self, case: Case, peak: float) -> dict[str, Any]:
        """Return what was measured; the first turn only warms up.

        Args:
            case: what was trained.
            peak: FLOP/s of a large product, or 0.
        """
        turns = self.turns[1:] or self.turns
        seconds = statistics.median(turn["seconds"] / turn["updates"] for turn in turns)
        params = turns[-1]["parameters"]
        rate = case.step_flops(params) / seconds
        return {
            f"{case.data.unit}_per_second": round(case.rows * case.data.units / seconds),
            "ms": round(seconds * 1e3, 2),
            "peak_gib": round(max(turn["peak"] for turn in turns) / 2**30, 2),
            **({"mfu_of_peak": round(rate / peak, 3)} if peak else {}),
            "first_update_s": round(self.first, 1),
            "seconds": round(sum(turn["seconds"] for turn in turns), 1),
            "loss": round(turns[-1]["loss"], 4),
            "parameters": params,
        }

    def end(self) -> None:
        """End the process."""
        self._say("end")
        self._process.wait(timeout=120)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise EndedEarly(self._process.wait(), self.log.read_text())


class EndedEarly(Exception):
    """A process ended before it was told to.

    Args:
        code: its exit code.
        log: what it wrote.
    """

    def __init__(self, code: int, log: str) -> None:
        telling = [
            line for line in log.splitlines() if "error" in line.lower() or "RESOURCE" in line
        ]
        self.reason = (telling or log.splitlines() or [""])[0 if telling else -1].strip()[:400]
        super().__init__(f"ended early with exit code {code}: {self.reason}\n{log[-3000:]}")


def since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - float(os.environ[BEGAN])


def tell(**figures: Any) -> None:
    """Tell the process that compares what was measured."""
    os.write(int(os.environ.get(TURNS, "1")), f"{MARK}{json.dumps(figures)}\n".encode())


def turn_over(started: float) -> bool:
    """Whether a turn that started then (`time.perf_counter`) has lasted long enough."""
    return time.perf_counter() - started >= float(os.environ.get(SECONDS, "0"))


def told_to_go() -> bool:
    """Wait for the next turn; false at the end."""
    return sys.stdin.readline().strip() == "go"
