"""JAX's profiler around whole steps, by hand or once during training."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.errors import UserError
from meshwright.processes import process_count, process_index
from meshwright.profile.events import MARK
from meshwright.profile.profile import Profile
from meshwright.profile.trace_times import read_profile


class Profiler:
    """Records a few steps.

    Each process records its own devices; several processes use one folder each. The trace replaces
    an older one.
    """

    def __init__(self, folder: Path, steps: int = 5) -> None:
        self.steps = steps
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
        """Start once the devices have computed ``pending``, the results of earlier steps."""
        jax.block_until_ready(pending)
        options = jax.profiler.ProfileOptions()
        # Tracing every Python call would slow the steps down.
        options.python_tracer_level = 0
        shutil.rmtree(self.trace / "plugins", ignore_errors=True)
        jax.profiler.start_trace(self.trace, profiler_options=options)
        self._mark = jax.profiler.TraceAnnotation(MARK)
        self._mark.__enter__()

    def stop(self, pending: Any = None) -> None:
        """Stop once the devices have computed ``pending``, the results of the last step."""
        jax.block_until_ready(pending)
        self._mark.__exit__(None, None, None)
        jax.profiler.stop_trace()


WARM_UP = 2
"""Steps before the profile, which include one-time work."""


class NoProfiling:
    """Profiles nothing."""

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Note that a step was dispatched."""
        del pending, waited
        return None

    def close(self) -> None:
        """Note that the loop has ended."""


class Profiling(NoProfiling):
    """Profiles a few steps of a loop; ``program`` returns their optimized HLO text, if any."""

    def __init__(
        self, folder: Path, mesh: Mesh, program: Callable[[], str | None], *, steps: int = 5
    ) -> None:
        self._profiler = Profiler(folder, steps)
        self._mesh, self._program = mesh, program
        self._seen = 0
        self._waited = 0.0

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Note that a step was dispatched; return the profile once it is complete.

        ``waited`` are the seconds that the loop has waited for data so far.
        """
        self._seen += 1
        if self._seen == WARM_UP:
            self._profiler.start(pending)
            self._waited = waited
        if self._seen != WARM_UP + self._profiler.steps:
            return None
        self._profiler.stop(pending)
        return read_profile(
            self._profiler.trace,
            self._mesh,
            self._program(),
            steps=self._profiler.steps,
            input_wait_seconds=waited - self._waited,
        )

    def close(self) -> None:
        """Note that the loop has ended; an incomplete profile is discarded."""
        if WARM_UP <= self._seen < WARM_UP + self._profiler.steps:
            self._profiler.stop()
