"""The result of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.trainer.stop import Stop


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a training run.

    Attributes:
        losses: the mean loss of every logged update, by its number from 0.
        eval: the metrics of every evaluation, by updates done.
        updates: updates done, including those before a resume.
        seconds: duration, including compilation.
        stop: why the run ended: ``stop.reason`` is a `StopReason`, ``stop.text`` says it.
        state: the final state.
        assembled: the step and what it was made from.
        run_dir: the run folder; None for a run without one.
        extra: further results of whoever started the run, such as a sample of text.
    """

    losses: dict[int, float]
    eval: dict[int, dict[str, float]]
    updates: int
    seconds: float
    stop: Stop
    state: TrainState
    assembled: Assembled
    run_dir: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __repr__(self) -> str:
        """Show how the run went; states and programs would fill pages."""
        last = list(self.losses.values())[-1:]
        shown = f", loss {last[0]:.4f}" if last else ""
        return f"FitResult({self.updates} updates{shown}, {self.seconds:.1f} s, {self.stopped})"

    @property
    def stopped(self) -> str:
        """Why the run ended, as text."""
        return self.stop.text

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run; with a run_dir, the state was saved."""
        return self.stop.interrupted

    @property
    def model(self) -> Any:
        """The trained model, as the user wrote it."""
        return self.assembled.model(self.state)

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation; None without evaluation."""
        return self.eval[max(self.eval)]["loss"] if self.eval else None

    def summary(self) -> dict[str, Any]:
        """Return the content of result.json."""
        losses = list(self.losses.values())
        return {
            "updates": self.updates,
            "first_loss": losses[0] if losses else None,
            "final_loss": losses[-1] if losses else None,
            "eval_loss": self.eval_loss,
            "seconds": self.seconds,
            "stopped": self.stopped,
            **self.extra,
        }
