"""Attempts at a run: after a failure all processes restart from the last checkpoint."""

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from meshwright.errors import ExitCode
from meshwright.launch.environments import environments
from meshwright.launch.options import LaunchOptions
from meshwright.launch.supervise import Outcome, Requests, Supervisor
from meshwright.launch.team import Gathered, NextAttempt, Team
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.text.masking import mask_text
from meshwright.text.units import counted, human_seconds

WITHOUT_PROGRESS = 3
"""After this many restarts in a row without a new checkpoint, another one would not help."""
LONGEST_WAIT = 60.0
"""Seconds; the waits before restarts are 1, 2, 4, … up to this."""
FINAL_CODES = (
    ExitCode.DONE,
    ExitCode.BAD_INPUT,
    ExitCode.NOTHING_FITS,
    ExitCode.NOT_FINITE,
    ExitCode.PREEMPTED,
)
"""Exit codes that another attempt would not change, or that ask for none."""
LOG = "launch.log"
"""The file of a run folder with what the launcher said about failures and restarts."""
CHECKPOINTS = "checkpoints"
"""The folder of a run folder in which a checkpoint appears, under its step, once complete."""


@dataclass
class Attempts:
    """Runs a launch until it succeeds, or another attempt is of no use."""

    options: LaunchOptions
    environ: Mapping[str, str]
    stderr: IO[bytes]
    team: Team
    say: Callable[[str], None]
    _done: int = 0
    _useless: int = 0
    _useful: float = 0.0
    _committed: int | None = None
    _run_dir: Path | None = None
    _failure: str = ""
    _started: float = field(default_factory=time.time)
    _requests: Requests = field(default_factory=Requests)

    def run(self) -> int:
        """Return the exit code of the last attempt."""
        with self._requests.listening():
            while (gathered := self.team.gather(self._requests)) is not None:
                outcome = self._attempt(gathered)
                change = self._change(outcome)
                end = self._why_end(outcome, change)
                if end is not None:
                    self._summarize(outcome, end)
                    return outcome.code if change is None or change.code is None else change.code
                if change is not None:
                    self._log(change.text)
                if not self._wait(outcome):
                    break
            return ExitCode.PREEMPTED

    def _attempt(self, gathered: Gathered) -> Outcome:
        if gathered.text:
            self.say(gathered.text)
        run_dir = "" if self._run_dir is None else str(self._run_dir)
        earlier = EarlierAttempts(self._done, self._started, self._useful, run_dir, self._failure)
        shared = earlier.to_environment()
        if (allowed := self.team.allowed) is not None:
            shared |= allowed.to_environment()
        own = environments(self.options, self.environ, run=gathered.run, places=gathered.places)
        supervisor = Supervisor(
            self.options.command,
            stderr=self.stderr,
            requests=self._requests,
            grace_seconds=self.options.grace,
            hang_seconds=self.options.hang_timeout,
            remedy=self._remedy(),
        )
        outcome = supervisor.run([{**each, **shared} for each in own])
        self._done += 1
        self._failure = outcome.text
        return outcome

    def _change(self, outcome: Outcome) -> NextAttempt | None:
        """Note how an attempt ended, and return what it changes for the next one."""
        progress = self._note(outcome)
        if outcome.asked or not self._may_restart():
            return None
        change = self.team.after(outcome, progress=progress)
        if change is not None and change.is_fresh:
            self._useless = 0
        return change

    def _note(self, outcome: Outcome) -> bool:
        """Note whether there is a new checkpoint, and how much of the time led to it."""
        self._run_dir = outcome.run_dir or self._run_dir
        newest = newest_checkpoint(self._run_dir)
        progress = newest is not None and (self._committed is None or newest > self._committed)
        first = self._done == 1
        self._useless = 0 if progress or first else self._useless + 1
        self._committed = newest if progress else self._committed
        whole = outcome.code in (ExitCode.DONE, ExitCode.PREEMPTED)
        if whole or progress:
            self._useful += outcome.watch.useful_until(None if whole else newest)
        return progress

    def _may_restart(self) -> bool:
        return self._done <= self.options.restarts

    def _why_end(self, outcome: Outcome, change: NextAttempt | None) -> str | None:
        """Return why there is no other attempt, empty if that is obvious; else None."""
        if change is not None:
            return change.text if change.ends else None
        if outcome.asked or outcome.code in FINAL_CODES or not self.options.restarts:
            return ""
        if self._useless >= WITHOUT_PROGRESS:
            return (
                f"{WITHOUT_PROGRESS} restarts without a new checkpoint: the cause has to be fixed"
            )
        if not self._may_restart():
            return f"all {counted(self.options.restarts, 'restart')} used"
        return None

    def _wait(self, outcome: Outcome) -> bool:
        """Wait before the next attempt; False if a signal asks to stop."""
        seconds = min(2.0**self._useless, LONGEST_WAIT)
        start = "from the beginning"
        if self._committed is not None:
            start = f"from the checkpoint of step {self._committed}"
        self._log(
            f"{outcome.text}; restart {self._done} of {self.options.restarts} in "
            f"{seconds:g} s, {start}"
        )
        if self._requests.take(timeout=seconds) is None:
            return True
        self._log("stopped before the restart; the same command resumes" + self._folder_hint())
        return False

    def _log(self, text: str) -> None:
        """Print a line, and keep it in the run folder: the processes may not have known."""
        self.say(text)
        if self._run_dir is not None:
            with suppress(OSError), (self._run_dir / LOG).open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {mask_text(text)}\n")

    def _summarize(self, outcome: Outcome, end: str) -> None:
        """Say at the end what failed, why there is no other attempt, and how time was spent."""
        if outcome.text and not outcome.asked:
            self._log("; ".join(filter(None, (outcome.text, end))) + self._how_to_go_on(outcome))
        if self._done > 1:
            wall = max(time.time() - self._started, 1e-9)
            self._log(
                f"goodput {min(self._useful / wall, 1):.0%}: {human_seconds(self._useful)} of "
                f"{human_seconds(wall)} were steps that count, in "
                f"{counted(self._done, 'attempt')}"
            )

    def _how_to_go_on(self, outcome: Outcome) -> str:
        final = outcome.code in FINAL_CODES and outcome.code != ExitCode.PREEMPTED
        if final or self._committed is None:
            return ""
        return f"; step {self._committed} is saved, and the same command resumes from it" + (
            self._folder_hint()
        )

    def _folder_hint(self) -> str:
        if self._run_dir is None:
            return ""
        return f" with {shlex.quote(f'hydra.run.dir={self._run_dir}')}"

    def _remedy(self) -> str:
        if self._done < self.options.restarts:
            return "all processes are restarted"
        return "" if self.options.restarts else "--restarts N restarts all processes"


def newest_checkpoint(run_dir: Path | None) -> int | None:
    """Return the step of the newest complete checkpoint of a run; None if there is none."""
    if run_dir is None:
        return None
    try:
        names = [path.name for path in (run_dir / CHECKPOINTS).iterdir()]
    except OSError:
        return None
    return max((int(name) for name in names if name.isdecimal()), default=None)
