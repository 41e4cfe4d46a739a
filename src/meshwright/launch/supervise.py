"""Starting processes, and ending all of them when one fails or on a signal."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from meshwright.launch import guard
from meshwright.launch.merged_output import MergedOutput

GRACE_AFTER_FAILURE = 8.0
"""Seconds; the others can only wait for the process that failed, so they need little time."""
GRACE_AFTER_REQUEST = 60.0
"""Seconds; a run may save a checkpoint before it stops."""
TERMINATE_DELAY = 0.5
"""Seconds the others have to fail on their own before they are terminated."""

_NEVER = float("inf")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Supervisor:
    """Runs one command in several processes until the last one has ended."""

    def __init__(
        self, command: Sequence[str], *, stderr: IO[bytes], grace_seconds: float | None = None
    ) -> None:
        self._command = list(command)
        self._grace = grace_seconds
        self._merged = MergedOutput(stderr)
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._pumps: list[threading.Thread] = []
        self._running: set[int] = set()
        self._ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._asked = False
        self._failure: tuple[int, int] | None = None
        self._terminate_at = self._kill_at = _NEVER

    def run(self, environments: Sequence[Mapping[str, str]]) -> int:
        """Start one process per environment and return the exit code of the first failure, or 0."""
        with _guarded_group() as group, self._listening():
            for environ in environments:
                self._start(int(environ["RANK"]), environ, group)
            while self._running:
                self._forward_signals()
                self._handle_exit()
                self._end_processes()
        # The group has ended, so the pipes are closed.
        for pump in self._pumps:
            pump.join()
        self._merged.release()
        self._summarize()
        return 0 if self._failure is None else exit_code(self._failure[1])

    def _start(self, rank: int, environ: Mapping[str, str], group: int) -> None:
        worker = subprocess.Popen(
            self._command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            # Process 0 prints the results, so it inherits stdout.
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=group,
        )
        self._workers[rank] = worker
        self._running.add(rank)
        for stream in filter(None, (worker.stdout, worker.stderr)):
            pump = threading.Thread(target=self._merged.pump, args=(rank, stream), daemon=True)
            pump.start()
            self._pumps.append(pump)
        # One thread per process, so that failures arrive in the order they happen.
        threading.Thread(target=self._wait_for, args=(rank, worker), daemon=True).start()

    def _wait_for(self, rank: int, worker: subprocess.Popen[bytes]) -> None:
        self._ends.put((rank, worker.wait()))

    def _forward_signals(self) -> None:
        """Forward the first signal to the processes; a second one kills them."""
        while not self._requests.empty():
            number = self._requests.get()
            self._send(signal.SIGKILL if self._asked else number)
            self._asked = True
            self._terminate_at = _NEVER
            self._kill_at = time.monotonic() + self._seconds(GRACE_AFTER_REQUEST)

    def _handle_exit(self) -> None:
        try:
            rank, returncode = self._ends.get(timeout=0.1)
        except queue.Empty:
            return
        self._running.discard(rank)
        if returncode == 0 or self._failure is not None:
            return
        self._failure = (rank, returncode)
        if not self._asked:
            self._terminate_at = time.monotonic() + TERMINATE_DELAY
            self._kill_at = self._terminate_at + self._seconds(GRACE_AFTER_FAILURE)
            if returncode < 0:
                # A killed process cannot print an error itself.
                self._merged.say(f"error: process {rank} {_describe_exit(returncode)}")

    def _end_processes(self) -> None:
        now = time.monotonic()
        if self._running and now >= self._terminate_at and self._failure is not None:
            rank, returncode = self._failure
            count = len(self._running)
            others = "the other is" if count == 1 else f"the other {count} are"
            self._merged.say(
                f"process {rank} {_describe_exit(returncode)}; {others} being terminated"
            )
            self._send(signal.SIGTERM)
            self._terminate_at = _NEVER
        if self._running and now >= self._kill_at:
            self._send(signal.SIGKILL)
            self._kill_at = _NEVER

    def _summarize(self) -> None:
        """Say at the end which process failed first, when, and why."""
        if self._failure is None or self._asked:
            return
        rank, returncode = self._failure
        update, cause = self._merged.last_update, self._merged.causes.get(rank, "")
        when = "" if update is None else f" after update {update}"
        why = f": {cause}" if cause else ""
        self._merged.say(f"launch: process {rank} {_describe_exit(returncode)}{when}{why}")

    def _send(self, number: int) -> None:
        for rank in self._running:
            self._workers[rank].send_signal(number)

    def _seconds(self, default: float) -> float:
        return default if self._grace is None else self._grace

    @contextmanager
    def _listening(self) -> Generator[None]:
        """Handle Ctrl-C and termination signals; the processes are in a group of their own."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, lambda n, _: self._requests.put(n)) for n in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_code(returncode: int) -> int:
    """Return the exit code a shell would report: 128 + n for a process ended by signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"


@contextmanager
def _guarded_group() -> Generator[int]:
    """Yield a process group that ends with this block, or with this process."""
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    assert leader.stdin is not None
    try:
        yield leader.pid
    finally:
        leader.stdin.close()
        leader.wait()
