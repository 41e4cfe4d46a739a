"""Which machines take part in the next attempt: those whose launchers come to the roll call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.config.environment import run_name
from meshwright.errors import ExitCode
from meshwright.launch.options import LaunchOptions
from meshwright.launch.processes_left import (
    TRIES,
    Failures,
    Gathered,
    NextAttempt,
    Wanted,
    has_no_mesh,
)
from meshwright.launch.supervise import Outcome, Requests
from meshwright.launch.whole_run import WholeRun
from meshwright.processes import join_timeout, own_interface
from meshwright.processes.ports import Address
from meshwright.processes.rendezvous import Meeting, Member, call_roll
from meshwright.runtime.attempts import Fit, ProcessRange


@dataclass
class MachinesLeft:
    """The machines of a run, without those that do not come back.

    Before each attempt the launchers meet at the address of process 0, which then listens there
    itself. Machine 0 decides who takes part.

    Attributes:
        options: what to launch.
        environ: the environment of the launcher.
        first: the run with all machines.
        notify: prints a line.
    """

    options: LaunchOptions
    environ: Mapping[str, str]
    first: WholeRun
    notify: Callable[[str], None]
    _members: list[int] = field(default_factory=list[int])
    _failures: Failures = field(default_factory=Failures)
    _fits: Mapping[int, Fit] = field(default_factory=dict[int, Fit])
    _most: int = 0

    def __post_init__(self) -> None:
        """Begin with all machines."""
        self._members = list(range(self._wanted.full))
        self._most = len(self._members)

    @property
    def allowed(self) -> ProcessRange | None:
        """The numbers of processes that the run may have."""
        wanted = self._wanted
        return ProcessRange(wanted.full * wanted.each, wanted.least * wanted.each, wanted.each)

    @property
    def _wanted(self) -> Wanted:
        nodes, least = self.options.nodes or 1, self.options.min_nodes or 1
        return Wanted(nodes, least, self.options.nprocs)

    @property
    def _me(self) -> int:
        return self.first.first_rank // self.options.nprocs

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
        self._fits = outcome.fits or self._fits
        if has_no_mesh(outcome, self._fits, len(self._members) * self.options.nprocs):
            return self._without_mesh()
        if outcome.code in (ExitCode.BAD_INPUT, ExitCode.NOT_FINITE):
            return None
        failed = self._failures.are_enough(outcome.rank, progress=progress)
        if not failed or self._me == 0:
            return None
        return NextAttempt(
            f"process {outcome.rank} did not come back after {TRIES} tries; this machine leaves "
            f"the run, and the others continue without it if enough are left "
            f"(--min-nodes {self._wanted.least})",
            ends=True,
        )

    def _without_mesh(self) -> NextAttempt:
        count = self._wanted.most(len(self._members) - 1, self._fits)
        text = self._wanted.describe(len(self._members), count, self._fits)
        self._most = count or 0
        return NextAttempt(text, ends=not count, code=ExitCode.NOTHING_FITS, is_fresh=True)

    def _call_roll(self) -> list[int]:
        run, wanted = self.first, self._wanted
        address = Address.parse(f"{run.address}:{run.port}")
        given = self.options.join_timeout
        meeting = Meeting(
            address,
            join_timeout(address) if given is None else given,
            own_interface(address),
            self.notify,
            "machine",
            wanted.least,
            frozenset(self._members),
        )
        name = f"{run_name(self.environ)} × {self.options.nprocs}"
        return call_roll(Member(self._me, wanted.full, name), meeting, self._choose)

    def _choose(self, joined: list[int]) -> list[int]:
        """Return as many of the machines that have joined as have a mesh; machine 0 always is."""
        count = self._wanted.most(min(len(joined), self._most), self._fits)
        return joined[: count or len(joined)]

    def _gathered(self, members: list[int]) -> Gathered | None:
        before, self._members = self._members, members
        wanted, nprocs = self._wanted, self.options.nprocs
        self._most = wanted.full
        text = "" if members == before else self._describe(before, members)
        if self._me not in members:
            self.notify(f"{text}; this machine is not needed")
            return None
        run = replace(
            self.first,
            first_rank=members.index(self._me) * nprocs,
            world_size=len(members) * nprocs,
        )
        return Gathered(run, range(nprocs), text)

    def _describe(self, before: list[int], members: list[int]) -> str:
        lost = [str(number) for number in before if number not in members]
        back = [str(number) for number in members if number not in before]
        parts = [
            *([f"machine{'s' * (len(lost) > 1)} {', '.join(lost)} did not come back"] * bool(lost)),
            *([f"machine{'s' * (len(back) > 1)} {', '.join(back)} came back"] * bool(back)),
            self._wanted.describe(len(members), len(members), self._fits),
        ]
        return "; ".join(parts)
