"""Which processes of a machine take part in the next attempt: those that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshwright.errors import ExitCode, UserError
from meshwright.launch.options import LaunchOptions
from meshwright.launch.supervise import Outcome, Requests
from meshwright.launch.whole_run import WholeRun, find_run
from meshwright.runtime.attempts import Fit, ProcessRange
from meshwright.text.units import counted

TRIES = 2
"""How often a failed process is restarted without a new checkpoint before it is given up: the first
failure may have been an accident."""


@dataclass(frozen=True)
class NextAttempt:
    """What the end of an attempt means for the next one.

    Attributes:
        text: what to print.
        ends: whether there is no next one here.
        code: the exit code if so; None for that of the attempt.
        is_fresh: whether earlier attempts say nothing about the next one.
    """

    text: str
    ends: bool = False
    code: int | None = None
    is_fresh: bool = False


@dataclass(frozen=True)
class Gathered:
    """Who takes part in an attempt.

    Attributes:
        run: the run, with all its processes.
        places: the places of this machine that are used.
        text: what has changed since the attempt before; empty for nothing.
    """

    run: WholeRun
    places: Sequence[int]
    text: str = ""


class Team(Protocol):
    """Decides who takes part in the attempts of a launch."""

    @property
    def allowed(self) -> ProcessRange | None:
        """The numbers of processes that the run may have; None if all are needed."""
        ...

    def gather(self, requests: Requests) -> Gathered | None:
        """Return who takes part in the next attempt; None if a signal asks to stop."""
        ...

    def after(self, outcome: Outcome, *, progress: bool) -> NextAttempt | None:
        """Return what an attempt means for the next one; None if nothing changes."""
        ...


@dataclass
class Failures:
    """Counts how often in a row the same process has failed without progress."""

    place: int | None = None
    tries: int = 0

    def are_enough(self, place: int | None, *, progress: bool) -> bool:
        """Note who has failed, and return whether it is given up."""
        again = place is not None and place == self.place and not progress
        self.place, self.tries = place, self.tries + 1 if again else 0
        return self.tries >= TRIES


@dataclass
class ProcessesLeft:
    """The processes of one machine, without those that do not come back.

    Attributes:
        options: what to launch.
        environ: the environment of the launcher.
        first: the run of the first attempt.
    """

    options: LaunchOptions
    environ: Mapping[str, str]
    first: WholeRun
    _lost: set[int] = field(default_factory=set[int])
    _used: Sequence[int] = ()
    _failures: Failures = field(default_factory=Failures)
    _fits: Mapping[int, Fit] = field(default_factory=dict[int, Fit])

    def __post_init__(self) -> None:
        """Refuse to leave out processes of which other machines would not know."""
        if self.options.min_procs is not None and self.first.is_shared:
            raise UserError(
                "--min-procs is for one machine",
                why=f"the environment has {self.first.world_size} processes on several machines",
                fix="write --nodes with their number, and --min-nodes instead of --min-procs",
            )

    @property
    def allowed(self) -> ProcessRange | None:
        """The numbers of processes that the run may have; None if all are needed."""
        least = self.options.min_procs
        return None if least is None else ProcessRange(self.options.nprocs, least)

    def gather(self, requests: Requests) -> Gathered | None:
        """Return the run with a new port, and the places that are used."""
        if not self._used:
            self._used = range(self.options.nprocs)
            return Gathered(self.first, self._used)
        # A new port: messages from processes of an earlier attempt must not reach this one.
        run = find_run(self.options, self.environ)
        if self.options.min_procs is not None:
            run = replace(run, world_size=len(self._used))
        return Gathered(run, self._used)

    def after(self, outcome: Outcome, *, progress: bool) -> NextAttempt | None:
        """Give up a process that does not come back, or a number without a mesh."""
        if self.options.min_procs is None:
            return None
        self._fits = outcome.fits or self._fits
        if has_no_mesh(outcome, self._fits, len(self._used)):
            return self._choose("", [*self._used][:-1])
        if outcome.rank is None or outcome.code in (ExitCode.BAD_INPUT, ExitCode.NOT_FINITE):
            return None
        place = self._used[outcome.rank]
        if not self._failures.are_enough(place, progress=progress):
            return None
        self._lost.add(place)
        left = [each for each in range(self.options.nprocs) if each not in self._lost]
        change = self._choose(f"process {outcome.rank} did not come back after {TRIES} tries", left)
        # What fails in training may well fail without this process too.
        return replace(change, is_fresh=outcome.watch.update_of(outcome.rank) is None)

    def _choose(self, lost: str, left: Sequence[int]) -> NextAttempt:
        """Use as many of the places as have a mesh."""
        wanted = Wanted(self.options.nprocs, self.options.min_procs or 1)
        count = wanted.most(len(left), self._fits)
        text = wanted.describe(len(left), count, self._fits)
        if count is None:
            code = None if len(left) < wanted.least else ExitCode.NOTHING_FITS
            return NextAttempt("; ".join(filter(None, (lost, text))), ends=True, code=code)
        self._used = left[:count]
        return NextAttempt("; ".join(filter(None, (lost, text))), is_fresh=True)


@dataclass(frozen=True)
class Wanted:
    """How many processes, or machines, a run has and needs.

    Attributes:
        full: the number if all are there.
        least: the fewest to continue with.
        each: processes of each, where machines are counted; 0 where processes are.
    """

    full: int
    least: int
    each: int = 0

    def most(self, left: int, fits: Mapping[int, Fit]) -> int | None:
        """Return the largest number with a mesh, as far as that is known; None without any."""
        counts = range(left, self.least - 1, -1)
        return next((n for n in counts if not self._fit(n, fits).problem), None)

    def describe(self, left: int, chosen: int | None, fits: Mapping[int, Fit]) -> str:
        """Return how the run continues with those that are left, or why it cannot."""
        flag = f"--min-{'nodes' if self.each else 'procs'} {self.least}"
        if left < self.least:
            return f"{self._counted(left)} left, fewer than {flag}"
        tried = range(left, self.least - 1 if chosen is None else chosen, -1)
        why = "; ".join(
            f"no mesh for {self._counted(n)}: {self._fit(n, fits).problem}" for n in tried
        )
        if chosen is None:
            return f"{self._counted(left)} left, and {flag}, but {why}"
        mesh = self._fit(chosen, fits).mesh
        on = f" on {'mesh ' * ('=' in mesh)}{mesh}" if mesh else ""
        text = f"continuing with {chosen} of {self._counted(self.full)} ({flag}){on}"
        return f"{text}, because there is {why}" if why else text

    def _fit(self, count: int, fits: Mapping[int, Fit]) -> Fit:
        return fits.get(count * (self.each or 1), Fit())

    def _counted(self, count: int) -> str:
        return counted(count, "machine") if self.each else counted(count, "process", "processes")


def has_no_mesh(outcome: Outcome, fits: Mapping[int, Fit], processes: int) -> bool:
    """Whether an attempt ended because its number of processes has no mesh."""
    return outcome.code == ExitCode.BAD_INPUT and bool(fits.get(processes, Fit()).problem)
