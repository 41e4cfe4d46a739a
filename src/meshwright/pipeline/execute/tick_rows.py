"""The tick table as arrays, one row per tick, and how often each stage runs which operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.pipeline.execute.buffers import (
    ABSENT,
    OpRow,
    SlotCounts,
    TickRow,
    allocate_slots,
    count_slots,
)
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import TickTable


def table_rows(table: TickTable, rounds: int = 1) -> tuple[SlotCounts, TickRow]:
    """Return a table as arrays [ticks, stages], repeated ``rounds`` times on new microbatches."""
    one, count = allocate_slots(table), table.shape.num_microbatches
    parts = [_later(one, number * count) for number in range(rounds)]
    return count_slots(table), jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def packed(rows: TickRow) -> tuple[Array, Callable[[Array], TickRow]]:
    """Return the rows of a stage as one array [ticks, columns], and a function that unpacks a row.

    A tick then reads one row, not a number from each of many arrays, for which accelerators would
    start as many kernels.
    """
    columns, tree = jax.tree.flatten(rows)
    dtypes = [column.dtype for column in columns]

    def read(row: Array) -> TickRow:
        row = lax.optimization_barrier(row)
        return jax.tree.unflatten(tree, [row[n].astype(dtype) for n, dtype in enumerate(dtypes)])

    return jnp.stack([column.astype(jnp.int32) for column in columns], 1), read


def _later(row: TickRow, by: int) -> TickRow:
    def shift(op: OpRow) -> OpRow:
        moved: Any = np.where(op.microbatch == ABSENT, ABSENT, op.microbatch + by).astype(np.int32)
        return replace(op, microbatch=moved)

    return replace(
        row, forward=shift(row.forward), backward=shift(row.backward), weight=shift(row.weight)
    )


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
    """How often each stage runs which operation in one step."""

    ticks: int
    counts: Mapping[TickOp, Sequence[int]]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.counts[TickOp.FORWARD])

    def times(self, op_name: str, count: int, stage: int) -> int:
        """Return how often a stage runs an instruction; ``count`` is how often if in every tick."""
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
