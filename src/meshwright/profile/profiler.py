"""JAX's profiler around whole updates, with traces for TensorBoard and Perfetto."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import UserError
from meshwright.processes import process_count, process_index

MARK = "meshwright profile"
"""The name in the trace of the time between start and stop."""


class Profiler:
    """Records a few updates.

    Each process records its own devices; several processes use one folder each.

    Args:
        folder: where the trace goes, replacing an older one.
        updates: number of updates between start and stop.

    Attributes:
        trace: the folder of this process's trace.
    """

    def __init__(self, folder: Path, updates: int = 5) -> None:
        self.updates = updates
        self.trace = folder / f"process_{process_index()}" if process_count() > 1 else folder
        self._mark: Any = None
        try:
            self.trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write a trace to {self.trace}",
                why=str(error),
                fix="choose a folder you can write to",
            ) from error

    def start(self, pending: Any = None) -> None:
        """Start once the devices have computed ``pending``, the results of earlier updates."""
        jax.block_until_ready(pending)
        options = jax.profiler.ProfileOptions()
        # Tracing every Python call would slow the updates down.
        options.python_tracer_level = 0
        shutil.rmtree(self.trace / "plugins", ignore_errors=True)
        jax.profiler.start_trace(self.trace, profiler_options=options)
        self._mark = jax.profiler.TraceAnnotation(MARK)
        self._mark.__enter__()

    def stop(self, pending: Any = None) -> None:
        """Stop once the devices have computed ``pending``, the results of the last update."""
        jax.block_until_ready(pending)
        self._mark.__exit__(None, None, None)
        jax.profiler.stop_trace()
