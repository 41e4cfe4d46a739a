"""Starting processes, and ending all of them when one fails or hangs, or on a signal."""

import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO

from meshwright.errors import ExitCode
from meshwright.launch import guard
from meshwright.launch.merged_output import MergedOutput
from meshwright.launch.watch import HANG_SECONDS, Stuck, Watch, dump_stacks, keep_stacks
from meshwright.runtime.attempts import Fit, Report
from meshwright.runtime.heartbeat import HEARTBEAT_FILE, report_file
from meshwright.text.units import numbered

GRACE_AFTER_FAILURE = 8.0
"""Seconds; the others can only wait for the process that failed, so they need little time."""
GRACE_AFTER_REQUEST = 60.0
"""Seconds; a run may save a checkpoint before it stops."""
TERMINATE_DELAY = 0.5
"""Seconds the others have to fail on their own before they are terminated."""
STOP_DELAY = 5.0
"""The same if one has stopped by request: they stop with it, and a signal might cut that short."""

_NEVER = float("inf")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended.

    The exit code is 0, that of the first failure, or 128 + n for signal n; ``asked`` if a signal to
    the launcher ended it. The text says which process failed, at which step and why; ``rank`` is
    None also if that was because another one is gone. ``fits`` says, by number of processes,
    whether the run can continue with that many; empty if unknown.
    """

    code: int
    asked: bool
    text: str
    run_dir: Path | None
    watch: Watch
    rank: int | None = None
    fits: Mapping[int, Fit] = field(default_factory=dict[int, Fit])


class Requests:
    """The signals to the launcher, which are forwarded instead of ending it."""

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Handle Ctrl-C and termination signals; the processes are in a group of their own."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, lambda n, _: self._numbers.put(n)) for n in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def take(self, timeout: float = 0.0) -> int | None:
        """Return the next signal; None if there is none within the time."""
        try:
            return self._numbers.get(timeout=timeout) if timeout else self._numbers.get_nowait()
        except queue.Empty:
            return None


@dataclass
class Supervisor:
    """Runs one command in several processes until the last one has ended."""

    command: Sequence[str]
    stderr: IO[bytes]
    requests: Requests
    grace_seconds: float | None = None
    hang_seconds: float | None = None
    remedy: str = ""

    def __post_init__(self) -> None:
        self._merged = MergedOutput(self.stderr, self._report_of)
        self._reports: dict[int, Report] = {}
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._pumps: dict[int, list[threading.Thread]] = {}
        self._running: set[int] = set()
        self._ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._asked = False
        self._failure: tuple[int, int] | None = None
        self._stuck: Stuck | None = None
        self._terminate_at = self._kill_at = _NEVER

    def run(self, environments: Sequence[Mapping[str, str]]) -> Outcome:
        """Start one process per environment, and return how they ended."""
        folder = Path(tempfile.mkdtemp(prefix="meshwright-launch-"))
        ranks = [int(environ["RANK"]) for environ in environments]
        self._files = {rank: folder / f"{rank}.beat" for rank in ranks}
        hang = HANG_SECONDS if self.hang_seconds is None else self.hang_seconds
        self._watch = Watch(self._files, hang)
        with guarded_group(folder) as group:
            for rank, environ in zip(ranks, environments, strict=True):
                self._start(rank, {**environ, HEARTBEAT_FILE: str(self._files[rank])}, group)
            while self._running:
                self._forward_signals()
                self._handle_exit()
                self._look()
                self._end_processes()
            self._watch.look({}, force=True)
            reports = [self._report_of(rank) for rank in ranks]
        # The group has ended, so the pipes are closed.
        for pump in chain.from_iterable(self._pumps.values()):
            pump.join()
        self._merged.release()
        code = 0 if self._failure is None else exit_code(self._failure[1])
        return Outcome(
            code if self._stuck is None else ExitCode.CHECK_FAILED,
            self._asked,
            self._text(),
            self._run_dir(),
            self._watch,
            self._culprit(),
            next((report.fits for report in reports if report.fits), {}),
        )

    def _start(self, rank: int, environ: Mapping[str, str], group: int) -> None:
        worker = subprocess.Popen(
            self.command,
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
            self._pumps.setdefault(rank, []).append(pump)
        # One thread per process, so that failures arrive in the order they happen.
        threading.Thread(target=lambda: self._ends.put((rank, worker.wait())), daemon=True).start()

    def _forward_signals(self) -> None:
        """Forward the first signal to the processes; a second one kills them."""
        while (number := self.requests.take()) is not None:
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
        if returncode == 0 or self._stuck is not None:
            return
        # What it said and did last is not read yet.
        for pump in self._pumps[rank]:
            pump.join(timeout=1)
        if self._failure is not None:
            if self._is_cause(rank, returncode):
                self._failure = (rank, returncode)
            return
        self._failure = (rank, returncode)
        self._watch.look({}, force=True)
        if not self._asked:
            stopped = returncode == ExitCode.PREEMPTED
            self._terminate_at = time.monotonic() + (STOP_DELAY if stopped else TERMINATE_DELAY)
            self._kill_at = self._terminate_at + self._seconds(GRACE_AFTER_FAILURE)
            if returncode < 0:
                # A killed process cannot print an error itself.
                self._error(self._text())

    def _is_cause(self, rank: int, returncode: int) -> bool:
        """Return whether a process failed by itself, and so took the one that ended before it.

        One that prints an error may take longer to end than the one that loses its connection.
        """
        if self._failure is None or self._asked:
            return False
        by_itself = returncode > 0 and returncode != ExitCode.PREEMPTED
        is_left_behind = self._merged.is_left_behind
        return by_itself and is_left_behind(self._failure[0]) and not is_left_behind(rank)

    def _look(self) -> None:
        """Look at the heartbeats, unless the processes are ending anyway."""
        if self._asked or self._failure is not None or self._stuck is not None:
            return
        pids = {rank: self._workers[rank].pid for rank in sorted(self._running)}
        self._stuck = self._watch.look(pids)
        for straggler in self._watch.stragglers.take():
            self._merged.notify(str(straggler))
        if self._stuck is not None:
            self._end_stuck(self._stuck, pids)

    def _end_stuck(self, stuck: Stuck, pids: Mapping[int, int]) -> None:
        """Name who is stuck, show where every process is, and kill all of them."""
        where = dump_stacks(self._files, pids, lambda rank, n: self._workers[rank].send_signal(n))
        self._error(self._text())
        for rank in pids:
            beat = self._watch.beat_of(rank)
            at = where.get(rank, "stopped by a signal" if rank in stuck.ranks else "no answer")
            step = "" if beat is None else f"step {beat.step}: "
            self._merged.say(f"  process {rank} at {step}{at}")
        folder = self._run_dir() or Path(tempfile.gettempdir())
        kept = keep_stacks(self._files, folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}")
        if kept:
            self._merged.say(f"  all stacks: {kept[0].parent}")
        # What hangs reacts to nothing else.
        self._send(signal.SIGKILL)

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

    def _error(self, text: str) -> None:
        self._merged.say(f"error: {text}" + (f"; {self.remedy}" if self.remedy else ""))

    def _text(self) -> str:
        """Return which process failed first, when, and why."""
        if self._stuck is not None:
            return str(self._stuck)
        if self._failure is None:
            return ""
        rank, returncode = self._failure
        if self._merged.is_left_behind(rank) and (silent := sorted(self._merged.silent)):
            lost = numbered("process", silent, len(silent))
            return f"process {rank} lost {lost}{self._when(rank)}"
        cause = self._merged.cause(rank)
        # Processes run ahead of the step that they find out about.
        when = "" if " step " in cause else self._when(rank)
        why = f": {cause}" if cause else ""
        return f"process {rank} {_describe_exit(returncode)}{when}{why}"

    def _when(self, rank: int) -> str:
        step = self._watch.step_of(rank)
        return "" if step is None else f" at step {step}"

    def _report_of(self, rank: int) -> Report:
        """Return what a process has reported; its file is gone when the group has ended."""
        known = self._reports.get(rank, Report())
        self._reports[rank] = Report.read(report_file(self._files[rank])) or known
        return self._reports[rank]

    def _run_dir(self) -> Path | None:
        """Return the run folder of the first process here; None if it has not reported one."""
        named = self._report_of(min(self._files)).run_dir
        return Path(named) if named else None

    def _culprit(self) -> int | None:
        """Return the process that failed by itself, as far as that is known."""
        if self._stuck is not None:
            return self._stuck.ranks[0] if len(self._stuck.ranks) == 1 else None
        if self._failure is None or self._merged.is_left_behind(self._failure[0]):
            return None
        rank = self._failure[0]
        absent = self._report_of(rank).absent
        if not absent:
            return rank
        # Of several that did not join, none is to blame more than another.
        return absent[0] if len(absent) == 1 and absent[0] in self._workers else None

    def _send(self, number: int) -> None:
        for rank in self._running:
            self._workers[rank].send_signal(number)

    def _seconds(self, default: float) -> float:
        return default if self.grace_seconds is None else self.grace_seconds


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
def guarded_group(folder: Path) -> Generator[int]:
    """Yield a process group that ends with this block, or with this process, as does a folder."""
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(folder)],
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
