"""A callback with which a run trains in turns; see peer_process.py."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping

import jax
from peer_process import STEPS, since_start, tell, told_to_go, turn_over

import meshwright as mw


class Turns(mw.Callback):
    """Waits for its turn after every logged step, and tells how long the last turn took."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._steps = 0
        self._over = False

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell what was measured, and wait for the next turn."""
        now = time.perf_counter()
        if self._over:
            return
        if step == 1:
            tell(first_update=since_start())
            return
        if self._start is not None:
            self._steps += int(os.environ[STEPS])
            if not turn_over(self._start):
                return
            stats = jax.local_devices()[0].memory_stats() or {}
            leaves = self.context._assembled.model_leaves  # pyright: ignore[reportPrivateUsage]
            tell(
                seconds=now - self._start,
                updates=self._steps,
                peak=stats.get("peak_bytes_in_use", 0),
                loss=values["loss"],
                parameters=leaves.num_parameters,
                kernels=self._kernels(),
            )
        if not told_to_go():
            self._over = True
            self.context.stop("the comparison is over")
        self._steps, self._start = 0, time.perf_counter()

    def _kernels(self) -> dict[str, int]:
        """Return how many parts of each kind which kernel evaluates."""
        uses = self.context._assembled.decision.kernels.uses  # pyright: ignore[reportPrivateUsage]
        names = (f"{use.kind}: {use.kernel or 'as written'}" for use in uses)
        return dict(sorted(Counter(names).items()))
