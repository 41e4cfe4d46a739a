"""Profiling in the middle of a run: some updates after the first ones, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright.profile.profile import Profile
from meshwright.profile.profiler import Profiler
from meshwright.profile.trace_times import read_profile

WARM_UP = 2
"""Updates before the profile, which hold what is done once."""


class NoProfiling:
    """Profiles nothing: what a loop has when nobody asked."""

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Be told that an update was handed to the devices."""
        del pending, waited
        return None

    def close(self) -> None:
        """Be told that the loop has ended."""


class Profiling(NoProfiling):
    """Profiles a few updates of a loop.

    Args:
        folder: where the trace goes.
        mesh: the mesh of the updates.
        program: gives the optimized text of their program; None if it has none.
        updates: how many to profile.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, program: Callable[[], str | None], *, updates: int = 5
    ) -> None:
        self._profiler = Profiler(folder, updates)
        self._mesh, self._program = mesh, program
        self._seen = 0
        self._waited = 0.0

    def after(self, pending: Any, waited: float) -> Profile | None:
        """Be told that an update was handed to the devices; returns the profile when it is there.

        Args:
            pending: results of the update, to wait for where the profile begins and ends.
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
        """Be told that the loop has ended; a profile that is not complete is given up."""
        if WARM_UP <= self._seen < WARM_UP + self._profiler.updates:
            self._profiler.stop()
