"""The scene of one fault: its folder, the reference, and launches that are checked as they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.drill.configuration import Configuration
from meshwright.drill.evidence import Evidence
from meshwright.drill.fault import Missed
from meshwright.drill.launched import Launched, launch
from meshwright.drill.leftovers import is_free, running_in
from meshwright.drill.told import Told

STOP_SECONDS = 10.0
"""How long a launch may take to notice that a process is gone, and to end or restart the others."""


@dataclass
class Scene:
    """Where a fault happens.

    Attributes:
        configuration: what is trained.
        folder: a folder for everything that the fault needs and leaves.
        fault: the name of the fault.
        reference: the run to which nothing happened; None while that is running.
        seconds: how long that took.
        batch_kinds: the kinds of numbers in its batches.
    """

    configuration: Configuration
    folder: Path
    fault: str = ""
    reference: Evidence | None = None
    seconds: float = 600.0
    batch_kinds: Sequence[str] = ()
    _launches: int = field(default=0, init=False)

    @property
    def nprocs(self) -> int:
        """The number of processes."""
        return self.configuration.nprocs

    @property
    def last(self) -> int:
        """The number of the last process, to which most faults happen."""
        return self.nprocs - 1

    @property
    def num_devices(self) -> int:
        """The devices of all processes."""
        return math.prod(self.undisturbed.plan["mesh"].values())

    @property
    def run(self) -> Evidence:
        """The run folder of this scene."""
        return Evidence(self.folder / "run")

    @property
    def undisturbed(self) -> Evidence:
        """The run to which nothing happened."""
        assert self.reference is not None
        return self.reference

    def train(
        self,
        *flags: str,
        inject: bool = False,
        settings: Sequence[str] = (),
        run_dir: Path | None = None,
        layout: Sequence[str] | None = None,
    ) -> Launched:
        """Launch the training, wait for its end, and check what holds after every end.

        Args:
            flags: further flags of `launch`.
            inject: whether the fault happens in it.
            settings: settings that differ from those of the configuration.
            run_dir: its run folder, instead of that of the scene.
            layout: flags with other numbers of processes and devices.
        """
        own = self.configuration
        run_dir = self.run.run_dir if run_dir is None else run_dir
        self._launches += 1
        notes = self.folder / f"notes-{self._launches}"
        notes.mkdir(parents=True)
        layout = own.layout() if layout is None else layout
        worker = ["-m", "meshwright.drill.worker", *own.train(run_dir, settings)]
        launched = launch(
            [*layout, *flags, "--", *worker],
            # As with -P, files in the working directory do not replace libraries.
            {**self._told(notes, run_dir, inject).to_environment(), "PYTHONSAFEPATH": "1"},
            self.folder / f"log-{self._launches}.txt",
            notes,
            self._patience(),
        )
        self._check_end(launched, Evidence(run_dir))
        return launched

    def resume(self) -> int:
        """Launch the same training again, check that it ends, and return where it went on."""
        launched = self.train()
        launched.check_code(0)
        return int(launched.find(r"continuing after update (\d+)")[1])

    def prepare(self, checkpoints: int) -> int:
        """Let the run be one that ended after some checkpoints; return the last one's update."""
        update = self.undisturbed.updates[checkpoints - 1]
        self.undisturbed.copy_until(update, self.run.run_dir)
        return update

    def check_same(self) -> None:
        """Raise unless the run is bit for bit the one to which nothing happened."""
        self.run.check_same(self.undisturbed)
        self.run.check_swept()

    def _told(self, notes: Path, run_dir: Path, inject: bool) -> Told:
        return Told(
            fault=self.fault if inject else "",
            notes=str(notes),
            run_dir=str(run_dir),
            update=self.configuration.update,
            every=self.configuration.every,
            save_seconds=0.0 if self.reference is None else self.reference.save_seconds(),
            limit_bytes=0 if self.reference is None else largest_file(self.reference) // 2,
        )

    def _patience(self) -> float:
        """Return the seconds after which a launch has failed: many times what it should take."""
        return 3600.0 if self.reference is None else 120.0 + 10 * self.seconds

    def _check_end(self, launched: Launched, run: Evidence) -> None:
        """Check that no process is left, no port taken, and no checkpoint lost or partial."""
        groups = {note["group"] for note in launched.processes}
        if left := running_in(groups):
            raise Missed(f"processes of group {left[0]} still run after the launcher")
        for port in {note["port"] for note in launched.processes} - {0}:
            if self.fault != "taken-port" and not is_free(port):
                raise Missed(f"port {port} is still taken after the launcher")
        if run.checkpoints.is_dir():
            committed = {update for note in launched.injected for update in note["committed"]}
            run.check_checkpoints(committed)


def largest_file(run: Evidence) -> int:
    """Return the size of the largest file of the first checkpoint of a run."""
    first = run.checkpoints / str(run.updates[0])
    return max(path.stat().st_size for path in first.rglob("*") if path.is_file())
