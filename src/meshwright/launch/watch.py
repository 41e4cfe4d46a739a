"""Watching launched processes from outside: which one is stuck, stopped or slow, and where."""

import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.runtime.heartbeat import STACKS_SIGNAL, Beat, Doing, read_beat, stacks_file
from meshwright.runtime.host_machine import process_stat
from meshwright.text.units import human_seconds, numbered

HANG_SECONDS = 600.0
"""How long a process may make no progress in a step; as long as processes wait for another."""
PATIENT_SECONDS = 1800.0
"""The same while it compiles, evaluates or saves, which takes long for good reasons."""
HELD_SECONDS = 60.0
"""The same while it does so and no other thread of the process gets the interpreter's lock."""
STEPS = 20
"""A hang is at least as long as this many steps."""
STOPPED_SECONDS = 2.0
"""How long a process may be stopped by a signal: a short stop does no harm."""
LOOK_SECONDS = 0.25

_PATIENT = (Doing.COMPILING, Doing.EVALUATING, Doing.SAVING)
_UNWATCHED = (Doing.STARTING, Doing.ENDED)
"""Before and after training, a process may do anything; waiting for others has its own limits."""

SLOWER = 1.5
"""A straggler takes this many times as long as the median of the others."""
LEAST_SHARE = 0.1
"""And loses at least this share of a step, so that noise of microseconds does not count."""
WINDOW_SECONDS = 5.0
WINDOW_STEPS = 10
LONGEST_WINDOW = 3600.0


@dataclass(frozen=True)
class Straggler:
    """A slow process: what takes it long, for how many seconds per step, and the others' median."""

    rank: int
    what: str
    seconds: float
    others: float
    step_seconds: float
    steps: int

    def __str__(self) -> str:
        """Return a line with the ratio and the numbers it is made of."""
        ratio = self.seconds / max(self.others, 1e-6)
        ratio_text = f"{ratio:.1f}" if ratio < 100 else "over 100"
        return (
            f"process {self.rank} is slow: {self.what} takes {1000 * self.seconds:.1f} ms per "
            f"step, {ratio_text} times the median of the others "
            f"({1000 * self.others:.1f} ms), and a step {1000 * self.step_seconds:.0f} ms "
            f"(over {self.steps} steps); the others wait for it"
        )


class Stragglers:
    """Compares processes over a window of steps, which doubles whenever one has been named."""

    def __init__(self) -> None:
        self._start: dict[int, Beat] = {}
        self._seconds = WINDOW_SECONDS
        self._found: list[Straggler] = []

    def add(self, beats: Mapping[int, Beat]) -> None:
        """Add the newest beats of all processes."""
        training = {rank: beat for rank, beat in beats.items() if beat.first >= 0}
        if len(training) < 2:
            return
        firsts = {rank: beat.first for rank, beat in self._start.items()}
        # The first steps do one-time work.
        if any(firsts.get(rank) != beat.first for rank, beat in training.items()):
            ready = all(beat.step > beat.first + 2 for beat in training.values())
            self._start = dict(training) if ready else {}
            return
        spans = {rank: (self._start[rank], beat) for rank, beat in training.items()}
        long = all(new.time - old.time >= self._seconds for old, new in spans.values())
        if long and all(new.step - old.step >= WINDOW_STEPS for old, new in spans.values()):
            self._compare(spans)
            self._start = dict(training)

    def take(self) -> list[Straggler]:
        """Return the stragglers found since the last call."""
        found, self._found = self._found, []
        return found

    def _compare(self, spans: Mapping[int, tuple[Beat, Beat]]) -> None:
        found: list[Straggler] = []
        for what, kind in (("its own work", "own_work"), ("waiting for input", "input_wait")):
            each = {
                rank: (getattr(new, kind) - getattr(old, kind)) / (new.step - old.step)
                for rank, (old, new) in spans.items()
            }
            for rank, (old, new) in spans.items():
                others = statistics.median(s for other, s in each.items() if other != rank)
                seconds, steps = each[rank], new.step - old.step
                whole = (new.useful - old.useful) / steps
                if seconds > SLOWER * others and seconds - others > LEAST_SHARE * whole:
                    found.append(Straggler(rank, what, seconds, others, whole, steps))
        self._found += found
        if found:
            self._seconds = min(2 * self._seconds, LONGEST_WINDOW)


@dataclass(frozen=True)
class Stuck:
    """Processes that make no progress, several if they stand at the same point, and the cause."""

    ranks: tuple[int, ...]
    cause: str
    step: int | None

    def __str__(self) -> str:
        """Return which processes hang, where, and how that was noticed."""
        who = numbered("process", self.ranks, len(self.ranks))
        hang = "hangs" if len(self.ranks) == 1 else "hang"
        when = "" if self.step is None else f" at step {self.step}"
        return f"{who} {hang}{when}: {self.cause}"


@dataclass
class _Seen:
    """What has been seen of a process: its last beat, and seconds for which nothing has changed.

    Those are: without a new beat, stopped by a signal, and with one thread holding the
    interpreter's lock.
    """

    beat: Beat | None = None
    idle: float = 0.0
    stopped: float = 0.0
    held: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=50))


class Watch:
    """Reads the heartbeats of processes.

    Times are added up look by look, and a look counts for one second at most: while the whole
    machine or the launcher itself was suspended, no process was stuck. Hangs shorter than
    ``hang_seconds`` do not count; 0 is for no limit.
    """

    def __init__(self, files: Mapping[int, Path], hang_seconds: float = HANG_SECONDS) -> None:
        self._files, self._hang = files, hang_seconds
        self._seen = {rank: _Seen() for rank in files}
        self._saves: dict[int, float] = {}
        self._last = time.monotonic()
        self.stragglers = Stragglers()

    def look(self, pids: Mapping[int, int], *, force: bool = False) -> Stuck | None:
        """Read all heartbeats if it is time to, or forced; return who of those running is stuck."""
        now = time.monotonic()
        if not force and now - self._last < LOOK_SECONDS:
            return None
        passed, self._last = min(now - self._last, 1.0), now
        for rank, seen in self._seen.items():
            self._read(rank, seen, passed)
            stopped = rank in pids and is_stopped(pids[rank])
            seen.stopped = seen.stopped + passed if stopped else 0.0
        self.stragglers.add({r: s.beat for r, s in self._seen.items() if s.beat is not None})
        return self._stopped(pids) or self._holding(pids) or self._hanging(pids)

    def _read(self, rank: int, seen: _Seen, passed: float) -> None:
        before, beat = seen.beat, read_beat(self._files[rank])
        alive = beat is None or before is None or beat.alive != before.alive or not beat.alive
        seen.held = 0.0 if alive else seen.held + passed
        if beat is None or (before is not None and beat.count == before.count):
            seen.beat, seen.idle = beat or before, seen.idle + passed
            return
        seen.beat, seen.idle = beat, 0.0
        if rank == min(self._files) and beat.saved >= 0:
            self._saves[beat.saved] = beat.saved_useful
        if before is not None and before.step < beat.step and before.first == beat.first >= 0:
            seconds = (beat.useful - before.useful) / (beat.step - before.step)
            seen.step_seconds.append(seconds)

    def _stopped(self, pids: Collection[int]) -> Stuck | None:
        stopped = [r for r in pids if self._seen[r].stopped >= STOPPED_SECONDS]
        if not stopped:
            return None
        return Stuck(tuple(stopped), "stopped by a signal (SIGSTOP)", self.step_of(stopped[0]))

    def _holding(self, pids: Collection[int]) -> Stuck | None:
        """Return a process that holds the interpreter's lock where a hang is long in coming."""
        for rank in pids if self._hang else ():
            beat, held = self._seen[rank].beat, self._seen[rank].held
            if beat is None or beat.doing not in _PATIENT or held < max(self._hang, HELD_SECONDS):
                continue
            cause = f"it has held the interpreter's lock for {human_seconds(held)} while "
            return Stuck((rank,), cause + beat.doing.text, self.step_of(rank))
        return None

    def _hanging(self, pids: Collection[int]) -> Stuck | None:
        """Return the processes that are behind all others, if they have made no progress."""
        beats = {
            rank: beat
            for rank in pids
            if (beat := self._seen[rank].beat) is not None and beat.doing not in _UNWATCHED
        }
        if not beats or not self._hang:
            return None
        behind = min(beat.count for beat in beats.values())
        ranks = [rank for rank, beat in beats.items() if beat.count == behind]
        idle, beat = min(self._seen[rank].idle for rank in ranks), beats[ranks[0]]
        if idle < self._limit(ranks[0], beat):
            return None
        cause = f"no progress for {human_seconds(idle)} while {beat.doing.text}"
        return Stuck(tuple(ranks), cause, beat.step)

    def _limit(self, rank: int, beat: Beat) -> float:
        # The first steps may still compile, load libraries or tune kernels.
        if beat.doing in _PATIENT or beat.step <= beat.first + 1:
            return max(self._hang, PATIENT_SECONDS)
        times = self._seen[rank].step_seconds
        return max(self._hang, STEPS * statistics.median(times)) if times else self._hang

    def beat_of(self, rank: int) -> Beat | None:
        """Return the last beat of a process; None if it has none."""
        return self._seen[rank].beat

    def step_of(self, rank: int) -> int | None:
        """Return the step a process is at; None if it does not train."""
        beat = self._seen[rank].beat
        return None if beat is None or beat.first < 0 else beat.step

    def useful_until(self, step: int | None) -> float:
        """Return the seconds of steps up to a saved one; of all steps for None."""
        beat = self._seen[min(self._seen)].beat
        if step is None:
            return 0.0 if beat is None else beat.useful
        return max((s for saved, s in self._saves.items() if saved <= step), default=0.0)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; a debugger is something else."""
    return process_stat(pid)[:1] == ["T"]


WAIT_SECONDS = 2.0
_FRAME = re.compile(r'^  File "(?:.*/)?([^/"]+)", line (\d+) in (.+)$', re.MULTILINE)
_SHOWN = 4
"""Frames of each process that are shown, the newest first."""


def dump_stacks(
    files: Mapping[int, Path], pids: Mapping[int, int], send: Callable[[int, int], None]
) -> dict[int, str]:
    """Ask processes for their stacks and return where each is, in a line.

    A process without a heartbeat file does not know the signal that ``send`` sends.
    """
    asked = [rank for rank in pids if files[rank].exists() and not is_stopped(pids[rank])]
    for rank in asked:
        send(rank, STACKS_SIGNAL)
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until and not all(_text(files[rank]) for rank in asked):
        time.sleep(0.05)
    # A dump takes an instant, and several writes.
    time.sleep(0.2)
    return {rank: _where(_text(files[rank])) for rank in asked}


def keep_stacks(files: Mapping[int, Path], target: Path) -> list[Path]:
    """Copy the dumps to a folder and return the files."""
    kept: list[Path] = []
    for rank, file in files.items():
        if not _text(file):
            continue
        with suppress(OSError):
            target.mkdir(parents=True, exist_ok=True)
            kept.append(Path(shutil.copyfile(stacks_file(file), target / f"process-{rank}.txt")))
    return kept


def _text(file: Path) -> str:
    try:
        return stacks_file(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _where(text: str) -> str:
    """Return the newest frames of the main thread, which is the last one of a dump."""
    frames = _FRAME.findall(text.rpartition("most recent call first")[2])
    shown = [f"{name}:{line} in {function}" for name, line, function in frames[:_SHOWN]]
    return " ← ".join(shown) or "no answer"
