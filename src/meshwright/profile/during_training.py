"""Profiling during training: a few updates, once, after a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright.profile.profile import Profile
from meshwright.profile.profiler import Profiler
from meshwright.profile.trace_times import read_profile

WARM_UP = 2
"""Updates before the profile, which include one-time work."""


class NoProfiling:
    """Profiles nothing."""

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Note that an update was dispatched."""
        del pending, waited
        return None

    def close(self) -> None:
        """Note that the loop has ended."""


class Profiling(NoProfiling):
    """Profiles a few updates of a loop.

    Args:
        folder: where the trace goes.
        mesh: the mesh of the updates.
        program: returns the optimized HLO text of the step; None if there is none.
        updates: number of updates to profile.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, program: Callable[[], str | None], *, updates: int = 5
    ) -> None:
        self._profiler = Profiler(folder, updates)
        self._mesh, self._program = mesh, program
        self._seen = 0
        self._waited = 0.0

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Note that an update was dispatched; return the profile once it is complete.

        Args:
            pending: results of the update, which the start and end of the profile wait for.
            waited: seconds the loop has waited for data so far.
        """
        self._seen += 1
        if self._seen == WARM_UP:
            self._profiler.start(pending)
            self._waited = waited
        if self._seen != WARM_UP + self._profiler.updates:
            return None
        self._profiler.stop(pending)
        return read_profile(
            self._profiler.trace,
            self._mesh,
            self._program(),
            updates=self._profiler.updates,
            input_wait_seconds=waited - self._waited,
        )

    def close(self) -> None:
        """Note that the loop has ended; an incomplete profile is discarded."""
        if WARM_UP <= self._seen < WARM_UP + self._profiler.updates:
            self._profiler.stop()
