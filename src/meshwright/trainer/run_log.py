"""The log of a run: what trackers are told at the start, after a profile, and at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.token_cache import take_origins
from meshwright.errors import first_line
from meshwright.ledgers import Ledger
from meshwright.plan import Plan
from meshwright.processes import is_main, process_count
from meshwright.profile import Profile
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.run_progress import Progress
from meshwright.trainer.starting.fewer_processes import fewer_processes_note
from meshwright.trainer.trained.fit_result import summarize


@dataclass(frozen=True)
class RunLog:
    """Logs how a run goes.

    Attributes:
        tracker: records metrics and events.
        run_dir: the run folder; None for a run that writes nothing.
    """

    tracker: Tracker
    run_dir: Path | None

    def start(
        self, facts: Mapping[str, Any], ledger: Ledger | None, plan: Plan, *, before: int, note: str
    ) -> None:
        """Log what is known before the first update.

        Args:
            facts: the content of run.json; its remarks are warnings.
            ledger: what the step communicates, if the compiler reports it.
            plan: the plan.
            before: updates done before this run.
            note: a remark on the evaluations; empty for none.
        """
        self.tracker.start(dict(facts))
        if ledger is not None:
            self._write_json("ledger.json", ledger.model_dump(mode="json"))
        for warning in facts["remarks"]:
            self.warn(warning)
        for origin in take_origins():
            self.tracker.event("note", 0, origin, {})
        earlier = EarlierAttempts.from_environment()
        if earlier.failure:
            message = f"attempt {earlier.count + 1}, after {earlier.failure}"
            self.tracker.event("restart", before, message, {"attempt": earlier.count + 1})
        if fewer := fewer_processes_note(plan):
            details = {"processes": process_count(), "mesh": dict(plan.mesh)}
            self.tracker.event("processes", before, fewer, details)
        if note:
            self.tracker.event("note", 0, note, {})

    def warn(self, message: str) -> None:
        """Log a warning."""
        self.tracker.event("warning", 0, message, {})

    def profile(self, update: int, profile: Profile) -> None:
        """Log where the time of updates goes."""
        self._write_json("profile.json", profile.to_json())
        shares = ", ".join(f"{n.replace('_', ' ')} {s:.0%}" for n, s in profile.shares.items())
        message = f"{profile.updates} updates of {profile.seconds_per_update:.3f} s: {shares}"
        self.tracker.event("profile", update, message, {"shares": profile.shares})
        for advice in profile.advice:
            self.tracker.event("warning", update, advice, {})

    def stop(self, progress: Progress, seconds: float) -> None:
        """Log the end of a run."""
        stop = progress.stop
        details = {"seconds": seconds, "reason": stop.reason.value}
        self.tracker.event("stop", progress.update, stop.text, details)

    def failed(self, progress: Progress, reason: str) -> None:
        """Log the end of a run by an error."""
        self.tracker.event("stop", progress.update, f"failed: {reason}", {"failed": True})

    def _write_json(self, name: str, content: Any) -> None:
        if self.run_dir is not None and is_main():
            (self.run_dir / name).write_text(json.dumps(content), encoding="utf-8")


def attempts_so_far(seconds: float) -> dict[str, Any]:
    """Return the attempts of this launch, and which share of their time went into kept updates."""
    earlier = EarlierAttempts.from_environment()
    goodput = earlier.goodput(own_heartbeat().useful, seconds)
    return {"goodput": goodput, "attempts": earlier.count + 1}


def failed_summary(
    progress: Progress, error: Exception, *, skipped: int, seconds: float
) -> dict[str, Any]:
    """Return the content of result.json for a run that another attempt would not save."""
    return {
        **summarize(progress.losses, progress.eval),
        "updates": progress.update,
        "skipped": skipped,
        "seconds": seconds,
        **attempts_so_far(seconds),
        "stopped": f"failed: {first_line(error)}",
        "failed": True,
    }
