"""The operations of a pipeline: what they depend on, how long they take, and when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from meshwright.config.argument_checks import check_count


class Kind(Enum):
    """What an operation computes.

    BACKWARD is both gradients at once. Another stage waits for that of the input, INPUT_GRAD; no
    stage waits for that of the weights, WEIGHT_GRAD.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    # Members are single objects; hashing their names would take most of the time of a table.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Op:
    """One operation of one stage; microbatches, and chunks within the stage, count from 0."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.microbatch}{chunk}"

    @property
    def releases(self) -> bool:
        """Whether the microbatch's activations can be freed afterwards."""
        return self.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)


Operations = Sequence[Sequence[Op]]
"""The operations of each stage, in order."""


class OpResult(NamedTuple):
    """What others wait for: an output (FORWARD) or an input's gradient of a virtual stage."""

    kind: Kind
    microbatch: int
    virtual: int


@dataclass(frozen=True)
class Shape:
    """The size of a pipeline: M microbatches between two flushes, S stages, v chunks on each.

    The virtual stage of a chunk is ``chunk·S + stage``.
    """

    num_microbatches: int
    num_stages: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "num_stages", "num_chunks"):
            check_count(name, getattr(self, name))

    def __str__(self) -> str:
        counts = [(self.num_stages, "stage", "s"), (self.num_microbatches, "microbatch", "es")]
        counts += [(self.num_chunks, "chunk", "s")] * (self.num_chunks > 1)
        return ", ".join(f"{n} {noun}{ending * (n > 1)}" for n, noun, ending in counts)

    @property
    def num_virtual(self) -> int:
        """The number of virtual stages."""
        return self.num_stages * self.num_chunks

    def nth_pass(self, number: int) -> tuple[int, int]:
        """Return (microbatch, chunk) of a stage's n-th forward pass.

        Microbatches pass the stages in groups of one per stage, chunk by chunk.
        """
        trip, position = divmod(number, self.num_stages)
        group, chunk = divmod(trip, self.num_chunks)
        return group * self.num_stages + position, chunk

    def ring(self, step: int) -> list[tuple[int, int]]:
        """Return pairs of sending and receiving stages; ``step`` is 1 forward and -1 backward."""
        count = self.num_stages
        pairs = [(i, (i + step) % count) for i in range(count)]
        # Only chunks close the ring: the last stage's next chunk is on the first stage.
        return pairs if self.num_chunks > 1 else [(a, b) for a, b in pairs if b - a == step]

    def virtual(self, op: Op, stage: int) -> int:
        """Return the virtual stage of an operation."""
        return op.chunk * self.num_stages + stage

    def gives(self, op: Op, stage: int) -> OpResult | None:
        """Return the result that other operations wait for, if any."""
        if op.kind is Kind.WEIGHT_GRAD:
            return None
        kind = Kind.FORWARD if op.kind is Kind.FORWARD else Kind.INPUT_GRAD
        return OpResult(kind, op.microbatch, self.virtual(op, stage))

    def needs(self, op: Op, stage: int) -> list[OpResult]:
        """Return the results that an operation waits for."""
        m, at = op.microbatch, self.virtual(op, stage)
        if op.kind is Kind.FORWARD:
            return [OpResult(Kind.FORWARD, m, at - 1)] if at > 0 else []
        if op.kind is Kind.WEIGHT_GRAD:
            return [OpResult(Kind.INPUT_GRAD, m, at)]
        own_output = OpResult(Kind.FORWARD, m, at)
        last = at == self.num_virtual - 1
        return [own_output] if last else [own_output, OpResult(Kind.INPUT_GRAD, m, at + 1)]


@dataclass(frozen=True)
class Times:
    """How long the operations of a whole stage (all chunks together) take, in any unit.

    ``scale`` is each stage's times relative to these; empty for equal stages.
    """

    forward: Fraction | int = 1
    input_grad: Fraction | int = 1
    weight_grad: Fraction | int = 1
    scale: tuple[Fraction | int, ...] = ()

    @classmethod
    def of_costs(cls, stage_costs: Sequence[int | float | Fraction]) -> Times:
        """Return the times of stages as slow as their costs say, the mean taking one unit."""
        costs = [Fraction(cost) for cost in stage_costs]
        mean = sum(costs, Fraction(0)) / max(1, len(costs))
        return cls(scale=tuple(cost / mean for cost in costs) if mean else ())

    def of(self, op: Op, stage: int, num_chunks: int = 1) -> Fraction:
        """Return how long an operation takes on a stage."""
        whole = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
        }[op.kind]
        return Fraction(whole) * (self.scale[stage] if self.scale else 1) / num_chunks


@dataclass(frozen=True)
class Span:
    """One operation of one stage, from ``start`` to ``end``."""

    stage: int
    op: Op
    start: Fraction
    end: Fraction
