"""Tasks by kind: loss, metrics and the batches they need."""

import importlib
from typing import Any

_TASKS = {
    "language_modeling": "LanguageModeling",
    "classification": "Classification",
    "reconstruction": "Reconstruction",
    "grpo": "GRPO",
    "dpo": "DPO",
}

TASK_KINDS: tuple[str, ...] = tuple(_TASKS)
"""The kinds `find_task` knows."""


def find_task(kind: str) -> type[Any]:
    """Return the task class of this kind, whose sizes are keyword arguments."""
    return getattr(importlib.import_module(f"{__name__}.{kind}"), _TASKS[kind])
