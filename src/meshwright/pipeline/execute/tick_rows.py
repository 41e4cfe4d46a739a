"""The tick table as arrays: one row per tick, one column per stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from meshwright.pipeline.execute.buffers import (
    ABSENT,
    Columns,
    Grid,
    SlotNumbers,
    Slots,
    allocate_slots,
)
from meshwright.pipeline.schedule.ticks import TickTable

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpRow:
    """An operation of a tick; see `buffers.Columns`."""

    microbatch: Array
    chunk: Array
    reads: Array
    saved: Array
    cut: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickRow:
    """What one tick of one stage does; numbers are negative where there is nothing to do.

    Attributes:
        forward: the forward operation.
        backward: the backward or input-gradient operation.
        weight: the weight-gradient operation.
        activation_in: the slot for the activation that has arrived.
        gradient_in: the slot for the gradient that has arrived.
        gradient_own: the slot for the gradient of the loss.
        stage: the stage's number.
        sends: whether any stage sends an activation.
        sends_back: whether any stage sends a gradient back.
    """

    forward: OpRow
    backward: OpRow
    weight: OpRow
    activation_in: Array
    gradient_in: Array
    gradient_own: Array
    stage: Array
    sends: Array
    sends_back: Array


@dataclass(frozen=True)
class SlotCounts(SlotNumbers):
    """The number of slots of each kind, and which messages every tick sends.

    Attributes:
        always_sends: whether every tick sends an activation.
        always_sends_back: whether every tick sends a gradient back.
    """

    always_sends: bool
    always_sends_back: bool

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are operations of their own."""
        return self.num_cuts > 0


def table_rows(table: TickTable, rounds: int = 1) -> tuple[SlotCounts, TickRow]:
    """Return a table as arrays [ticks, stages], repeated ``rounds`` times on new microbatches."""
    slots = allocate_slots(table)
    sends = _any_next(slots.activation_in)
    sends_back = _any_next(slots.gradient_in)
    counts = SlotCounts(
        slots.num_activations,
        slots.num_gradients,
        slots.num_saved,
        slots.num_cuts,
        always_sends=bool(sends.all()),
        always_sends_back=bool(sends_back.all()),
    )
    one = _arrays(slots, table.shape.num_stages, sends, sends_back)
    count = table.shape.num_microbatches
    parts = [_later(one, number * count) for number in range(rounds)]
    return counts, jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


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


def _arrays(slots: Slots, num_stages: int, sends: Flags, sends_back: Flags) -> TickRow:
    ticks = len(slots.activation_in)
    stage = np.broadcast_to(np.arange(num_stages, dtype=np.int32), (ticks, num_stages))
    every = np.ones(num_stages, bool)
    # Typed as Any: the record holds NumPy arrays, which the executor sees traced.
    make: Any = TickRow
    return make(
        *(_op(columns) for columns in (slots.forward, slots.backward, slots.weight)),
        activation_in=_grid(slots.activation_in),
        gradient_in=_grid(slots.gradient_in),
        gradient_own=_grid(slots.gradient_own),
        stage=stage,
        sends=sends[:, None] & every,
        sends_back=sends_back[:, None] & every,
    )


def _op(columns: Columns) -> OpRow:
    make: Any = OpRow
    chunk = np.maximum(_grid(columns.chunk), 0)
    return make(
        _grid(columns.microbatch),
        chunk,
        _grid(columns.reads),
        _grid(columns.saved),
        _grid(columns.cut),
    )


def _later(row: TickRow, by: int) -> TickRow:
    def shift(op: OpRow) -> OpRow:
        moved: Any = np.where(op.microbatch == ABSENT, ABSENT, op.microbatch + by).astype(np.int32)
        return replace(op, microbatch=moved)

    return replace(
        row, forward=shift(row.forward), backward=shift(row.backward), weight=shift(row.weight)
    )


def _any_next(arrivals: Grid) -> Flags:
    """Return for each tick whether anything arrives before the next one."""
    return np.append((arrivals != ABSENT).any(axis=1)[1:], False)


def _grid(values: Grid) -> Numbers:
    return values.astype(np.int32)
