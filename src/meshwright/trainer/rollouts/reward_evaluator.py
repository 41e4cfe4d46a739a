"""Evaluation by rewards, in place of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.data.protocols import Data
from meshwright.step.state import TrainState
from meshwright.trainer.rollouts.rollout import Rollouts


@dataclass(frozen=True)
class RewardEvaluator:
    """Evaluates training states by the rewards of held-out prompts, completed greedily.

    Attributes:
        rollouts: completes and scores.
        data: the prompts.
        limit: the most prompts of an evaluation; None for all.
    """

    rollouts: Rollouts
    data: Data
    limit: int | None = None

    def __call__(self, state: TrainState, warn: Callable[[str], None]) -> dict[str, float]:
        """Return the mean rewards; the loss is the reward with the sign changed."""
        return self.rollouts.evaluate(state, self.data, self.limit)

    def compile_ahead(self) -> None:
        """Do nothing: completions compile as they grow."""

    def note(self) -> str:
        """Say how many prompts are used where that is a choice; empty if all are."""
        total = self.data.num_samples or 0
        if self.limit is None or self.limit >= total:
            return ""
        return f"each evaluation uses {self.limit:,} of {total:,} prompts"
