"""How often each stage runs the operations of a tick, which depends on the schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np

from meshwright.pipeline.execute.tick_rows import table_rows
from meshwright.pipeline.schedule.schedules import Schedule

F = TypeVar("F", bound=Callable[..., object])

_MARK = "tick-"
_NAMED = re.compile(rf"{_MARK}(\w+)")


def named(operation: str, function: F) -> F:
    """Name what a function traces after an operation of a tick."""
    return jax.named_scope(_MARK + operation)(function)


@dataclass(frozen=True)
class OpCounts:
    """How often each stage runs which operation in one update.

    Attributes:
        ticks: how many ticks there are.
        counts: by name of an operation, how often each stage runs it.
    """

    ticks: int
    counts: Mapping[str, Sequence[int]]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.counts["forward"])

    def times(self, op_name: str, count: int, stage: int) -> int:
        """Return how often a stage runs an instruction that ``count`` runs of all ticks have.

        Args:
            op_name: where the instruction comes from in the traced program.
            count: how often it would run if it were part of every tick.
            stage: the stage.
        """
        operations = _NAMED.findall(op_name)
        if not operations:
            return count
        return count // self.ticks * self.counts[operations[-1]][stage]


def count_operations(
    schedule: Schedule, num_microbatches: int, num_stages: int, rounds: int = 1
) -> OpCounts:
    """Count the operations in the table that stages execute."""
    table = schedule.table(num_microbatches, num_stages)
    _, rows = table_rows(table, rounds)
    forward, backward = (np.asarray(op.microbatch) >= 0 for op in (rows.forward, rows.backward))
    begins = forward & (np.asarray(rows.forward.reads) < 0)
    hands_on, hands_back = ({a for a, _ in table.shape.ring(step)} for step in (1, -1))
    stages = np.arange(num_stages)
    runs = {
        "forward": forward,
        "backward": backward,
        "weight": np.asarray(rows.weight.microbatch) >= 0,
        "embedding": begins,
        "head": np.asarray(rows.gradient_own) >= 0,
        "send": np.asarray(rows.sends) & np.isin(stages, list(hands_on)),
        "send_back": np.asarray(rows.sends_back) & np.isin(stages, list(hands_back)),
    }
    counts = {name: [int(n) for n in done.sum(0)] for name, done in runs.items()}
    return OpCounts(len(forward), counts)
