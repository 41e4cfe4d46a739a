"""Two hooks of training, for programs that run a training command inside a process of their own.

Nothing is registered in an ordinary run. `meshwright drill` injects its faults here, so that they
happen in the real loop and no code has to be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LogHook = Callable[[int], object]
"""Called with each logged step, once its metrics are known and while the next one runs."""
BatchHook = Callable[[int, Any], Any]
"""Called with the number of a batch, from 0, and the rows of it that this process read; returns
the rows to train on."""

_log_hooks: list[LogHook] = []
_batch_hooks: list[BatchHook] = []


def add_log_hook(hook: LogHook) -> None:
    """Call a function with every step that is logged, before the callbacks."""
    _log_hooks.append(hook)


def add_batch_hook(hook: BatchHook) -> None:
    """Pass every batch through a function before it is placed on the devices."""
    _batch_hooks.append(hook)


def run_log_hooks(step: int) -> None:
    """Call the hooks of a logged step."""
    for hook in _log_hooks:
        hook(step)


def run_batch_hooks(number: int, batch: Any) -> Any:
    """Return a batch as the hooks have left it."""
    for hook in _batch_hooks:
        batch = hook(number, batch)
    return batch
