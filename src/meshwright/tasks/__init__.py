"""Tasks by kind: loss, metrics and the batches they need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from meshwright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from meshwright.tasks.task import Task

_TASKS = {
    "language_modeling": "LanguageModeling",
    "classification": "Classification",
    "reconstruction": "Reconstruction",
}

TASK_KINDS: tuple[str, ...] = tuple(_TASKS)
"""The kinds `find_task` knows."""


def find_task(kind: str) -> type[Task]:
    """Return the task class of this kind, whose sizes are keyword arguments."""
    if kind not in _TASKS:
        raise UserError(
            f"There is no task {kind!r}.",
            why=f"The tasks are {', '.join(_TASKS)}.",
            fix=did_you_mean(kind, _TASKS),
        )
    return getattr(importlib.import_module(f"{__name__}.{kind}"), _TASKS[kind])
