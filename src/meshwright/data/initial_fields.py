"""Fields of a batch that the initial model computes once for every sample, such as references."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.indexed_data import SourceData
from meshwright.data.protocols import Data, HostBatch, Rows

Table = dict[str, NDArray[np.float32]]
"""One number per sample, by the name of its field; empty until they are computed."""


@dataclass(frozen=True)
class InitialFields(SourceData):
    """Batches of a source with fields from a table, by the numbers of the samples.

    They are 0 until the table is filled where a run starts.
    """

    names: Sequence[str] = ()
    table: Table = field(default_factory=dict[str, NDArray[np.float32]])

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the batch of one step with its fields, or these rows of it."""
        ids = self.ids(step, batch_size, rows)
        known = self.table or dict.fromkeys(self.names, np.zeros(len(self.source), np.float32))
        own = {name: known[name][ids] for name in self.names}
        return {**super().batch(step, batch_size, rows), **own}


def task_of(loss: Any) -> Any:
    """Return the task whose method a loss is, or the loss itself."""
    inner = inspect.unwrap(loss)
    return getattr(inner, "__self__", inner)


def with_initial_fields(data: Data, task: Any, tables: dict[str, Table] | None = None) -> Data:
    """Return data with the fields that a task lets the initial model compute.

    These are the names in its ``initial_names``, which its ``initial_fields(model, batch)`` returns
    with one number per sample. Data that bring them stay as they are, and so do those whose samples
    have no numbers. New tables are added to those known, by the fingerprint of their data.
    """
    names = tuple(getattr(task, "initial_names", ()))
    plain = type(data) is SourceData
    if not names or not plain or not len(data.source) or set(names) <= data.batch(0, 1).keys():
        return data
    given = {each.name: getattr(data, each.name) for each in fields(data)}
    table: Table = {} if tables is None else tables.setdefault(data.fingerprint(), {})
    return InitialFields(**given, names=names, table=table)
