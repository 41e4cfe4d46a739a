"""Processes that call reward functions with a time limit; one that hangs or dies is replaced."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from meshwright.errors import UserError
from meshwright.rewards import reward_worker

START_SECONDS = 120.0
"""How long a process may take to import the functions."""


class Calls(NamedTuple):
    """Calls of one numbered reward function, by their named arguments, which one process makes."""

    function: int
    arguments: list[dict[str, Any]]


Answer = tuple[list[float] | None, str]
"""What a call returned, and what went wrong."""


@dataclass
class _Worker:
    """A process, the number of its call (None if it is idle), and when that must have ended."""

    process: subprocess.Popen[bytes]
    connection: Any
    call: int | None = None
    deadline: float = 0.0

    def end(self) -> None:
        # Something else may have closed it by now, such as the end of the interpreter.
        with suppress(OSError):
            self.connection.close()
        self.process.kill()
        self.process.wait()


@dataclass
class RewardProcesses:
    """Calls importable functions, named ``package.module:Name``, in processes of their own.

    A call takes at most so many seconds, on average over those that are made together.
    """

    names: Sequence[str]
    seconds: float
    count: int
    _workers: list[_Worker] = field(default_factory=list["_Worker"])

    def run(self, calls: Sequence[Calls]) -> list[list[Answer] | str]:
        """Make all calls, and return their answers in the same order.

        Where the process hung or ended, there is the reason instead.
        """
        answers: list[list[Answer] | str] = [""] * len(calls)
        waiting = deque(range(len(calls)))
        while len(self._workers) < min(self.count, len(calls)):
            self._workers.append(self._start())
        while waiting or any(worker.call is not None for worker in self._workers):
            for worker in self._workers:
                if worker.call is None and waiting:
                    self._send(worker, waiting.popleft(), calls)
            busy = [worker for worker in self._workers if worker.call is not None]
            soonest = min(worker.deadline for worker in busy)
            wait([w.connection for w in busy], max(0.0, soonest - time.monotonic()))
            for worker in busy:
                self._collect(worker, answers)
        return answers

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def __del__(self) -> None:
        self.close()

    def _send(self, worker: _Worker, number: int, calls: Sequence[Calls]) -> None:
        seconds = self.seconds * len(calls[number].arguments)
        worker.call, worker.deadline = number, time.monotonic() + seconds
        # If it has ended since its last call, `_collect` finds the closed connection.
        with suppress(OSError):
            worker.connection.send(calls[number])

    def _collect(self, worker: _Worker, answers: list[list[Answer] | str]) -> None:
        """Take the answer of a process; replace it if it is late or gone."""
        assert worker.call is not None
        problem = ""
        try:
            if worker.connection.poll():
                answers[worker.call] = worker.connection.recv()
            elif time.monotonic() >= worker.deadline:
                problem = f"it took longer than {self.seconds:g} s"
            else:
                return
        except (EOFError, OSError):
            code = worker.process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            problem = f"its process ended ({how})"
        if problem:
            answers[worker.call] = problem
            worker.end()
            self._workers[self._workers.index(worker)] = self._start()
        worker.call = None

    def _start(self) -> _Worker:
        own, others = Pipe()
        # Functions are imported from where this process finds them; a GPU is not theirs.
        folders = os.pathsep.join(dict.fromkeys([os.getcwd(), *sys.path]))
        command = [sys.executable, reward_worker.__file__, str(others.fileno()), folders]
        process = subprocess.Popen(
            [*command, *self.names],
            pass_fds=[others.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        others.close()
        worker = _Worker(process, own)
        try:
            answer = own.recv() if own.poll(START_SECONDS) else (None, "it takes too long")
        except EOFError:
            answer = (None, f"the process ended with {process.wait()}")
        if answer[0] != reward_worker.READY:
            worker.end()
            raise UserError(
                f"the rewards {', '.join(self.names)} cannot be imported in a process",
                why=answer[1],
                fix="make them importable from the working directory",
            )
        return worker


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
