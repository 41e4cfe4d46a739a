"""Who takes part in the next attempt: the processes of a machine, or the machines, that come back.

The launchers of several machines meet before each attempt; a launch on one machine decides alone.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.config.environment import run_name
from meshwright.errors import ExitCode, UserError
from meshwright.launch.options import LaunchOptions
from meshwright.launch.supervise import Outcome, Requests
from meshwright.launch.whole_run import WholeRun, find_run
from meshwright.processes import join_timeout, own_interface
from meshwright.processes.ports import Address
from meshwright.processes.rendezvous import Meeting, Member, call_roll
from meshwright.runtime.attempts import Fit, ProcessRange
from meshwright.text.units import counted, numbered

TRIES = 2
"""How often a failed process is restarted without a new checkpoint before it is given up: the first
failure may have been an accident."""


@dataclass(frozen=True)
class NextAttempt:
    """What the end of an attempt means for the next one.

    If there is none here, the exit code is None for that of the attempt. If it ``is_fresh``,
    earlier attempts say nothing about it.
    """

    text: str
    ends: bool = False
    code: int | None = None
    is_fresh: bool = False


@dataclass(frozen=True)
class Gathered:
    """The run of an attempt, the places of this machine that are used, and what has changed."""

    run: WholeRun
    places: Sequence[int]
    text: str = ""


@dataclass
class Team:
    """The members of a run, processes or machines, of which some may not come back."""

    noun: ClassVar[str]

    options: LaunchOptions
    environ: Mapping[str, str]
    first: WholeRun
    _full: int = field(default=1, init=False)
    _least: int | None = field(default=None, init=False)
    _each: int = field(default=1, init=False)
    _fits: Mapping[int, Fit] = field(default_factory=dict[int, Fit], init=False)
    _failed: int | None = field(default=None, init=False)
    _tries: int = field(default=0, init=False)

    @property
    def allowed(self) -> ProcessRange | None:
        """The numbers of processes that the run may have; None if all are needed."""
        if self._least is None:
            return None
        return ProcessRange(self._full * self._each, self._least * self._each, self._each)

    def gather(self, requests: Requests) -> Gathered | None:
        """Return who takes part in the next attempt; None if a signal asks to stop."""
        raise NotImplementedError

    def after(self, outcome: Outcome, *, progress: bool) -> NextAttempt | None:
        """Return what an attempt means for the next one; None if nothing changes."""
        raise NotImplementedError

    def _has_no_mesh(self, outcome: Outcome, members: int) -> bool:
        """Whether an attempt ended because its number of processes has no mesh."""
        self._fits = outcome.fits or self._fits
        return outcome.code == ExitCode.BAD_INPUT and bool(self._fit(members).problem)

    def _is_given_up(self, place: int | None, *, progress: bool) -> bool:
        """Note which process has failed, and return whether it did so too often in a row."""
        again = place is not None and place == self._failed and not progress
        self._failed, self._tries = place, self._tries + 1 if again else 0
        return self._tries >= TRIES

    def _most(self, left: int) -> int | None:
        """Return the largest number with a mesh, as far as that is known; None without any."""
        counts = range(left, (self._least or 1) - 1, -1)
        return next((n for n in counts if not self._fit(n).problem), None)

    def _describe(self, left: int, chosen: int | None) -> str:
        """Return how the run continues with those that are left, or why it cannot."""
        least = self._least or 1
        flag = f"--min-{'procs' if self.noun == 'process' else 'nodes'} {least}"
        if left < least:
            return f"{counted(left, self.noun)} left, fewer than {flag}"
        tried = range(left, least - 1 if chosen is None else chosen, -1)
        why = "; ".join(
            f"no mesh for {counted(n, self.noun)}: {self._fit(n).problem}" for n in tried
        )
        if chosen is None:
            return f"{counted(left, self.noun)} left, and {flag}, but {why}"
        mesh = self._fit(chosen).mesh
        on = f" on {'mesh ' * ('=' in mesh)}{mesh}" if mesh else ""
        text = f"continuing with {chosen} of {counted(self._full, self.noun)} ({flag}){on}"
        return f"{text}, because there is {why}" if why else text

    def _fit(self, members: int) -> Fit:
        return self._fits.get(members * self._each, Fit())


@dataclass
class ProcessesLeft(Team):
    """The processes of one machine, without those that do not come back."""

    noun = "process"

    _lost: set[int] = field(default_factory=set[int], init=False)
    _used: Sequence[int] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Refuse to leave out processes of which other machines would not know."""
        self._full, self._least = self.options.nprocs, self.options.min_procs
        if self._least is not None and self.first.is_shared:
            raise UserError(
                "--min-procs is for one machine",
                why=f"the environment has {self.first.world_size} processes on several machines",
                fix="write --nodes with their number, and --min-nodes instead of --min-procs",
            )

    def gather(self, requests: Requests) -> Gathered | None:
        """Return the run with a new port, and the places that are used."""
        if not self._used:
            self._used = range(self._full)
            return Gathered(self.first, self._used)
        # A new port: messages from processes of an earlier attempt must not reach this one.
        run = find_run(self.options, self.environ)
        if self._least is not None:
            run = replace(run, world_size=len(self._used))
        return Gathered(run, self._used)

    def after(self, outcome: Outcome, *, progress: bool) -> NextAttempt | None:
        """Give up a process that does not come back, or a number without a mesh."""
        if self._least is None:
            return None
        if self._has_no_mesh(outcome, len(self._used)):
            return self._choose("", [*self._used][:-1])
        if outcome.rank is None or outcome.code in (ExitCode.BAD_INPUT, ExitCode.NOT_FINITE):
            return None
        place = self._used[outcome.rank]
        if not self._is_given_up(place, progress=progress):
            return None
        self._lost.add(place)
        left = [each for each in range(self._full) if each not in self._lost]
        change = self._choose(
            f"process {outcome.rank} did not come back after {TRIES} tries; ", left
        )
        # What fails in training may well fail without this process too.
        return replace(change, is_fresh=outcome.watch.step_of(outcome.rank) is None)

    def _choose(self, lost: str, left: Sequence[int]) -> NextAttempt:
        """Use as many of the places as have a mesh."""
        count = self._most(len(left))
        text = lost + self._describe(len(left), count)
        if count is None:
            code = None if len(left) < (self._least or 1) else ExitCode.NOTHING_FITS
            return NextAttempt(text, ends=True, code=code)
        self._used = left[:count]
        return NextAttempt(text, is_fresh=True)


@dataclass
class MachinesLeft(Team):
    """The machines of a run, without those that do not come back.

    Before each attempt the launchers meet at the address of process 0, which then listens there
    itself. Machine 0 decides who takes part.
    """

    noun = "machine"

    notify: Callable[[str], None]
    _members: list[int] = field(default_factory=list[int], init=False)
    _limit: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Begin with all machines."""
        self._full, self._least = self.options.nodes or 1, self.options.min_nodes or 1
        self._each, self._me = self.options.nprocs, self.first.first_rank // self.options.nprocs
        self._members, self._limit = list(range(self._full)), self._full

    def gather(self, requests: Requests) -> Gathered | None:
        """Call the roll; None if a signal asks to stop meanwhile."""
        answers: queue.SimpleQueue[list[int] | Exception] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put(self._call_roll())
            except Exception as error:
                answers.put(error)

        threading.Thread(target=call, daemon=True).start()
        while answers.empty():
            if requests.take(timeout=0.1) is not None:
                self.notify("stopped before all machines had joined")
                return None
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        return self._gathered(answer)

    def after(self, outcome: Outcome, *, progress: bool) -> NextAttempt | None:
        """Leave the run if a process of this machine does not come back."""
        if self._has_no_mesh(outcome, len(self._members)):
            count = self._most(len(self._members) - 1)
            self._limit = count or 0
            text = self._describe(len(self._members), count)
            return NextAttempt(text, ends=not count, code=ExitCode.NOTHING_FITS, is_fresh=True)
        if outcome.code in (ExitCode.BAD_INPUT, ExitCode.NOT_FINITE):
            return None
        if not self._is_given_up(outcome.rank, progress=progress) or self._me == 0:
            return None
        return NextAttempt(
            f"process {outcome.rank} did not come back after {TRIES} tries; this machine leaves "
            f"the run, and the others continue without it if enough are left "
            f"(--min-nodes {self._least})",
            ends=True,
        )

    def _call_roll(self) -> list[int]:
        address = Address.parse(f"{self.first.address}:{self.first.port}")
        given = self.options.join_timeout
        meeting = Meeting(
            address,
            join_timeout(address) if given is None else given,
            own_interface(address),
            self.notify,
            "machine",
            self._least,
            frozenset(self._members),
        )
        name = f"{run_name(self.environ)} × {self._each}"
        return call_roll(Member(self._me, self._full, name), meeting, self._choose)

    def _choose(self, joined: list[int]) -> list[int]:
        """Return as many of the machines that have joined as have a mesh; machine 0 always is."""
        count = self._most(min(len(joined), self._limit))
        return joined[: count or len(joined)]

    def _gathered(self, members: list[int]) -> Gathered | None:
        before, self._members, self._limit = self._members, members, self._full
        text = "" if members == before else self._changes(before, members)
        if self._me not in members:
            self.notify(f"{text}; this machine is not needed")
            return None
        first_rank, size = members.index(self._me) * self._each, len(members) * self._each
        run = replace(self.first, first_rank=first_rank, world_size=size)
        return Gathered(run, range(self._each), text)

    def _changes(self, before: list[int], members: list[int]) -> str:
        gone = [number for number in before if number not in members]
        back = [number for number in members if number not in before]
        changes = ((gone, "did not come back"), (back, "came back"))
        parts = [f"{numbered('machine', who, len(who))} {what}" for who, what in changes if who]
        return "; ".join([*parts, self._describe(len(members), len(members))])
