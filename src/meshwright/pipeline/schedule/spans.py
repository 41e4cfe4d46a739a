"""Operations with their start and end times, and how much of the time stages work."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from meshwright.pipeline.schedule.operations import Op, Shape


@dataclass(frozen=True)
class Span:
    """One operation of one stage, from ``start`` to ``end``."""

    stage: int
    op: Op
    start: Fraction
    end: Fraction


@dataclass(frozen=True, repr=False)
class Spans:
    """When every operation of a pipeline starts and ends.

    Attributes:
        shape: the pipeline's size.
        spans: the operations.
        makespan: from the first operation's start to the last one's end.
    """

    shape: Shape
    spans: tuple[Span, ...]
    makespan: Fraction

    @property
    def bubble(self) -> Fraction:
        """The share of the stages' time in which they wait."""
        busy = sum((span.end - span.start for span in self.spans), Fraction(0))
        return 1 - busy / (self.makespan * self.shape.num_stages)

    @property
    def efficiency(self) -> Fraction:
        """The share of the stages' time in which they work."""
        return 1 - self.bubble

    def of_stage(self, stage: int) -> list[Span]:
        """Return a stage's operations in order."""
        return sorted((s for s in self.spans if s.stage == stage), key=lambda s: (s.start, s.end))
