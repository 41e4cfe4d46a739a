"""Two hooks of training, for programs that run a training command inside a process of their own.

Nothing is registered in an ordinary run. `meshwright drill` injects its faults here, so that they
happen in the real loop and no code has to be replaced.
"""

from collections.abc import Callable
from typing import Any

LogHook = Callable[[int], object]
"""Called with each logged step, once its metrics are known and while the next one runs."""
BatchHook = Callable[[int, Any], Any]
"""Called with the number of a batch, from 0, and the rows of it that this process read; returns
the rows to train on."""

log_hooks: list[LogHook] = []
batch_hooks: list[BatchHook] = []

add_log_hook, add_batch_hook = log_hooks.append, batch_hooks.append
