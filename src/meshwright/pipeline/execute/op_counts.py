"""How often each stage runs the operations of a tick, given the schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import jax
import numpy as np

from meshwright.pipeline.execute.tick_rows import table_rows
from meshwright.pipeline.schedule.schedules import Schedule


class TickOp(StrEnum):
    """The operations of a tick, by their names in the compiled program.

    Stages send in one direction (send, send_back), or where the program asks once for both, in a
    branch that sends in one direction only, and in one that sends in both.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    EMBEDDING = "embedding"
    HEAD = "head"
    SEND = "send"
    SEND_BACK = "send_back"
    ONLY_SEND = "only_send"
    ONLY_SEND_BACK = "only_send_back"
    BOTH_SEND = "both_send"
    BOTH_SEND_BACK = "both_send_back"


F = TypeVar("F", bound=Callable[..., object])

_MARK = "tick-"
_NAMED = re.compile(rf"{_MARK}(\w+)")


def named(operation: TickOp, function: F) -> F:
    """Return the function, its traced operations named after an operation of a tick."""
    return jax.named_scope(_MARK + operation)(function)


@dataclass(frozen=True)
class OpCounts:
    """How often each stage runs which operation in one update.

    Attributes:
        ticks: number of ticks.
        counts: for each operation, how often each stage runs it.
    """

    ticks: int
    counts: Mapping[TickOp, Sequence[int]]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.counts[TickOp.FORWARD])

    def times(self, op_name: str, count: int, stage: int) -> int:
        """Return how often a stage runs an instruction.

        Args:
            op_name: the instruction's name in the traced program.
            count: how often it would run if it were part of every tick.
            stage: the stage.
        """
        operations = _NAMED.findall(op_name)
        if not operations:
            return count
        return count // self.ticks * self.counts[TickOp(operations[-1])][stage]


def count_operations(
    schedule: Schedule, num_microbatches: int, num_stages: int, rounds: int = 1
) -> OpCounts:
    """Count the operations in the table that stages execute."""
    table = schedule.table(num_microbatches, num_stages)
    _, rows = table_rows(table, rounds)
    forward, backward = (np.asarray(op.microbatch) >= 0 for op in (rows.forward, rows.backward))
    starts = forward & (np.asarray(rows.forward.reads) < 0)
    stages = np.arange(num_stages)
    ahead, back = (np.isin(stages, [a for a, _ in table.shape.ring(step)]) for step in (1, -1))
    sends, sends_back = np.asarray(rows.sends), np.asarray(rows.sends_back)
    runs = {
        TickOp.FORWARD: forward,
        TickOp.BACKWARD: backward,
        TickOp.WEIGHT: np.asarray(rows.weight.microbatch) >= 0,
        TickOp.EMBEDDING: starts,
        TickOp.HEAD: np.asarray(rows.gradient_own) >= 0,
        TickOp.SEND: sends & ahead,
        TickOp.SEND_BACK: sends_back & back,
        TickOp.ONLY_SEND: sends & ~sends_back & ahead,
        TickOp.ONLY_SEND_BACK: ~sends & sends_back & back,
        TickOp.BOTH_SEND: sends & sends_back & ahead,
        TickOp.BOTH_SEND_BACK: sends & sends_back & back,
    }
    counts = {name: [int(n) for n in mask.sum(0)] for name, mask in runs.items()}
    return OpCounts(len(forward), counts)
