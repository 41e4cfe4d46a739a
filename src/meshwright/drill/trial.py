"""A fault, and the trial in which it is injected: its folder, its launches, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.drill.configuration import Configuration
from meshwright.drill.launched import Launched, is_free, launch, running_in
from meshwright.drill.process import Instructions
from meshwright.drill.run_folder import NotSurvived, RunFolder

STOP_SECONDS = 10.0
"""How long a launch may take to notice that a process is gone, and to end or restart the others."""
SAME = "losses and state bit-equal"
_RESTART = r"restart 1 of 3 in \d+ s, from the (?:checkpoint of update (\d+)|beginning)"


@dataclass
class Trial:
    """One fault, injected into a copy of the run.

    Attributes:
        configuration: the run.
        folder: a folder for everything that the fault needs and leaves.
        fault: the name of the fault.
        baseline: the run without a fault; None while that is running.
        seconds: how long that took.
        batch_dtypes: the dtypes of its batches.
    """

    configuration: Configuration
    folder: Path
    fault: str = ""
    baseline: RunFolder | None = None
    seconds: float = 600.0
    batch_dtypes: Sequence[str] = ()
    _launches: int = field(default=0, init=False)

    @property
    def nprocs(self) -> int:
        """The number of processes."""
        return self.configuration.nprocs

    @property
    def last(self) -> int:
        """The number of the last process, in which most faults are injected."""
        return self.nprocs - 1

    @property
    def num_devices(self) -> int:
        """The devices of all processes."""
        return math.prod(self.reference.plan["mesh"].values())

    @property
    def run(self) -> RunFolder:
        """The run of this trial."""
        return RunFolder(self.folder / "run")

    @property
    def reference(self) -> RunFolder:
        """The run without a fault, once it has ended."""
        assert self.baseline is not None
        return self.baseline

    def train(
        self,
        *flags: str,
        inject: bool = False,
        settings: Sequence[str] = (),
        run_dir: Path | None = None,
        layout: Sequence[str] | None = None,
    ) -> Launched:
        """Launch the run, wait for its end, and check what holds after every end.

        Args:
            flags: further flags of `launch`.
            inject: whether to inject the fault.
            settings: settings that differ from those of the configuration.
            run_dir: its run folder, instead of that of the trial.
            layout: flags with other numbers of processes and devices.
        """
        own = self.configuration
        run_dir = self.run.path if run_dir is None else run_dir
        self._launches += 1
        notes = self.folder / f"notes-{self._launches}"
        notes.mkdir(parents=True)
        layout = own.layout() if layout is None else layout
        worker = ["-m", "meshwright.drill.worker", *own.train(run_dir, settings)]
        instructions = self._instructions(notes, run_dir, inject)
        launched = launch(
            [*layout, *flags, "--", *worker],
            # As with -P, files in the working directory do not replace libraries.
            {**instructions.to_environment(), "PYTHONSAFEPATH": "1"},
            self.folder / f"log-{self._launches}.txt",
            notes,
            self._patience(),
        )
        self._check_end(launched, RunFolder(run_dir))
        return launched

    def restarted(self, pattern: str, *flags: str, within: float = STOP_SECONDS) -> str:
        """Inject a fault after which all processes must start again by themselves.

        Args:
            pattern: how the launcher names the process, the update and the cause.
            flags: further flags of `launch`.
            within: seconds in which it has to notice.
        """
        launched = self.train("--restarts=3", *flags, inject=True)
        launched.check_code(0)
        seconds = launched.noticed(pattern, within)
        update = int(launched.find(_RESTART)[1] or 0)
        launched.check_none_lost(update)
        self.check_same()
        return f"noticed after {seconds:.1f} s, restarted from update {update}, {SAME}"

    def resumed(self, ended: Launched, found: str) -> str:
        """Run the same command after a launch that ended, and check that nothing is lost."""
        launched = self.train()
        launched.check_code(0)
        update = int(launched.find(r"continuing after update (\d+)")[1])
        ended.check_none_lost(update)
        self.check_same()
        return f"{found}, resumed from update {update}, {SAME}"

    def prepare(self, checkpoints: int) -> int:
        """Copy the run as it was after some checkpoints; return the update of the last one."""
        update = self.reference.updates[checkpoints - 1]
        self.reference.copy_until(update, self.run.path)
        return update

    def check_same(self) -> None:
        """Raise unless the run equals the one without a fault, bit for bit."""
        self.run.check_same(self.reference)
        self.run.check_swept()

    def _instructions(self, notes: Path, run_dir: Path, inject: bool) -> Instructions:
        return Instructions(
            fault=self.fault if inject else "",
            notes=str(notes),
            run_dir=str(run_dir),
            update=self.configuration.update,
            every=self.configuration.every,
            save_seconds=0.0 if self.baseline is None else self.baseline.save_seconds(),
            limit_bytes=0 if self.baseline is None else largest_file(self.baseline) // 2,
        )

    def _patience(self) -> float:
        """Return the seconds after which a launch has failed: many times what it should take."""
        return 3600.0 if self.baseline is None else 120.0 + 10 * self.seconds

    def _check_end(self, launched: Launched, run: RunFolder) -> None:
        """Check that no process is left, no port taken, and no checkpoint lost or partial."""
        groups = {note["group"] for note in launched.processes}
        if left := running_in(groups):
            raise NotSurvived(f"processes of group {left[0]} still run after the launcher")
        for port in {note["port"] for note in launched.processes} - {0}:
            if self.fault != "taken-port" and not is_free(port):
                raise NotSurvived(f"port {port} is still taken after the launcher")
        if run.checkpoints.is_dir():
            committed = {update for note in launched.injected for update in note["committed"]}
            run.check_checkpoints(committed)


def _always(trial: Trial) -> str:
    return ""


def several_processes(trial: Trial) -> str:
    """Return why a fault among processes does not apply here; empty if it does."""
    return "" if trial.nprocs > 1 else "there is one process; --nprocs 2 starts another"


@dataclass(frozen=True)
class Fault:
    """A fault of a drill; `fault_makers` has how it is made.

    Attributes:
        name: what ``--only`` calls it.
        what: what happens.
        expected: how the run has to recover.
        check: injects it, checks the outcome (`NotSurvived` if it is another one), and returns
            what was found.
        why_not: why the fault does not apply to a configuration; empty if it does.
        starts: how often processes are started, to estimate the time.
    """

    name: str
    what: str
    expected: str
    check: Callable[[Trial], str]
    why_not: Callable[[Trial], str] = _always
    starts: float = 2.0


def largest_file(run: RunFolder) -> int:
    """Return the size of the largest file of the first checkpoint of a run."""
    first = run.checkpoints / str(run.updates[0])
    return max(path.stat().st_size for path in first.rglob("*") if path.is_file())
