"""The run that is drilled, a fault, and the trial in which it is injected, with its checks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.config.compose import quoted
from meshwright.drill.launched import Launched, NotSurvived, RunFolder, is_free, launch, running_in
from meshwright.drill.process import Instructions

STOP_SECONDS = 10.0
"""How long a launch may take to notice that a process is gone, and to end or restart the others."""
SAME = "losses and state bit-equal"
FEWEST_STEPS = 6
"""Two checkpoints before a fault, and steps after it."""
DEFAULT_STEPS = 8

_CUT_DOWN = (
    "training.max_duration=null",
    "training.eval_every=null",
    "training.eval_loss=null",
    "training.early_stopping_patience=null",
    "training.sample_tokens=0",
    "training.profile_communication=false",
    "data.eval_fraction=0",
    "data.eval_path=null",
    "tracking.log_every=1",
    "tracking.tensorboard=false",
    "tracking.wandb=false",
    "tracking.mlflow=false",
    "checkpoint.enabled=true",
    # All of them are kept, so that one that is missing was lost.
    "checkpoint.keep_last=1000000",
    "checkpoint.keep_best=0",
    "resume=auto",
)
"""Settings of a drill: no evaluations or trackers, and every step and checkpoint is kept."""
_RESTART = r"restart 1 of 3 in \d+ s, from the (?:checkpoint of step (\d+)|beginning)"


@dataclass(frozen=True)
class Configuration:
    """The run that is drilled; ``words`` are settings and flags as the user wrote them."""

    words: tuple[str, ...]
    nprocs: int
    devices: int | None
    steps: int
    cache: Path | None = None

    @property
    def every(self) -> int:
        """Steps between two checkpoints."""
        return self.steps // 4 if self.steps >= 2 * FEWEST_STEPS else 2

    @property
    def step(self) -> int:
        """The step at which faults are injected: the one after the second checkpoint."""
        return 2 * self.every + 1

    def train(self, run_dir: Path, settings: Sequence[str] = ()) -> list[str]:
        """Return the command line of a run, after the name of the program."""
        cache = [] if self.cache is None else [f"compilation_cache={quoted(str(self.cache))}"]
        return [
            "train",
            *self.words,
            *_CUT_DOWN,
            f"training.steps={self.steps}",
            f"checkpoint.every={self.every}",
            *cache,
            f"hydra.run.dir={quoted(str(run_dir))}",
            *settings,
        ]

    def layout(self, nprocs: int | None = None, devices: int | None = None) -> list[str]:
        """Return the flags of `launch` for the processes; by default those of the user."""
        devices = self.devices if nprocs is None else devices
        own = [] if devices is None else [f"--devices-per-process={devices}"]
        return [f"--nprocs={nprocs or self.nprocs}", *own]


@dataclass
class Trial:
    """One fault, injected into a copy of the run.

    The baseline is the run without a fault, None while that is running; ``seconds`` and
    ``batch_dtypes`` are of it. The folder is for everything that the fault needs and leaves.
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
        code: int | None = None,
    ) -> Launched:
        """Launch the run, wait for its end, and check what holds after every end.

        Flags and settings are further ones; ``layout`` has flags with other numbers of processes
        and devices. With a ``code``, raise unless it is the exit code.
        """
        own = self.configuration
        run_dir = self.run.path if run_dir is None else run_dir
        self._launches += 1
        notes = self.folder / f"notes-{self._launches}"
        notes.mkdir(parents=True)
        layout = own.layout() if layout is None else layout
        worker = ["-m", "meshwright.drill.worker", *own.train(run_dir, settings)]
        baseline = self.baseline
        instructions = Instructions(
            fault=self.fault if inject else "",
            notes=str(notes),
            run_dir=str(run_dir),
            step=own.step,
            every=own.every,
            save_seconds=0.0 if baseline is None else baseline.save_seconds(),
            limit_bytes=0 if baseline is None else largest_file(baseline) // 2,
        )
        launched = launch(
            [*layout, *flags, "--", *worker],
            # As with -P, files in the working directory do not replace libraries.
            {**instructions.to_environment(), "PYTHONSAFEPATH": "1"},
            self.folder / f"log-{self._launches}.txt",
            notes,
            # Many times what it should take.
            3600.0 if baseline is None else 120.0 + 10 * self.seconds,
        )
        self._check_end(launched, RunFolder(run_dir))
        if code is not None:
            launched.check_code(code)
        return launched

    def restarted(self, pattern: str, *flags: str, within: float = STOP_SECONDS) -> str:
        """Inject a fault after which all processes must start again by themselves.

        ``pattern`` is how the launcher names the process, the step and the cause, ``within`` some
        seconds.
        """
        launched = self.train("--restarts=3", *flags, inject=True, code=0)
        seconds = launched.noticed(pattern, within)
        step = int(launched.find(_RESTART)[1] or 0)
        launched.check_none_lost(step)
        self.check_same()
        return f"noticed after {seconds:.1f} s, restarted from step {step}, {SAME}"

    def resumed(self, ended: Launched, found: str) -> str:
        """Run the same command after a launch that ended, and check that nothing is lost."""
        launched = self.train(code=0)
        step = int(launched.find(r"continuing after step (\d+)")[1])
        ended.check_none_lost(step)
        self.check_same()
        return f"{found}, resumed from step {step}, {SAME}"

    def prepare(self, checkpoints: int) -> int:
        """Copy the run as it was after some checkpoints; return the step of the last one."""
        step = self.reference.steps[checkpoints - 1]
        self.reference.copy_until(step, self.run.path)
        return step

    def check_same(self) -> None:
        """Raise unless the run equals the one without a fault, bit for bit."""
        self.run.check_same(self.reference)
        self.run.check_swept()

    def _check_end(self, launched: Launched, run: RunFolder) -> None:
        """Check that no process is left, no port taken, and no checkpoint lost or partial."""
        groups = {note["group"] for note in launched.processes}
        if left := running_in(groups):
            raise NotSurvived(f"processes of group {left[0]} still run after the launcher")
        for port in {note["port"] for note in launched.processes} - {0}:
            if self.fault != "taken-port" and not is_free(port):
                raise NotSurvived(f"port {port} is still taken after the launcher")
        if run.checkpoints.is_dir():
            committed = {step for note in launched.injected for step in note["committed"]}
            run.check_checkpoints(committed)


def several_processes(trial: Trial) -> str:
    """Return why a fault among processes does not apply here; empty if it does."""
    return "" if trial.nprocs > 1 else "there is one process; --nprocs 2 starts another"


@dataclass(frozen=True)
class Fault:
    """A fault of a drill; `fault_makers` has how it is made.

    ``check`` injects it, checks the outcome (`NotSurvived` if it is another one than expected), and
    returns what was found; ``why_not`` says why it does not apply to a configuration; ``starts`` is
    how often processes are started, to estimate the time.
    """

    name: str
    what: str
    expected: str
    check: Callable[[Trial], str]
    why_not: Callable[[Trial], str] = lambda _: ""
    starts: float = 2.0


def largest_file(run: RunFolder) -> int:
    """Return the size of the largest file of the first checkpoint of a run."""
    first = run.checkpoints / str(run.steps[0])
    return max(path.stat().st_size for path in first.rglob("*") if path.is_file())
