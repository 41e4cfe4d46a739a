"""Estimates of plans for one model, from its traced program."""

from __future__ import annotations

from typing import Protocol

from meshwright.hardware import Hardware
from meshwright.plan import Plan
from meshwright.planner.estimate import Estimate


class Estimator(Protocol):
    """Estimates plans for one model, loss and optimizer."""

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        ...

    @property
    def num_blocks(self) -> int:
        """The number of repeated blocks, which pipeline stages divide; 0 without such blocks."""
        ...

    @property
    def tensor_sizes(self) -> frozenset[int]:
        """The sizes of a tensor axis, up to 64, that divide what it would divide."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample; 1 for data other than tokens."""
        ...

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return what a plan needs. Milliseconds: a search asks for thousands."""
        ...
