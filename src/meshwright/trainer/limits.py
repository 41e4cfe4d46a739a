"""When a run ends: after so many updates, after some time, or when a callback asks for it."""

from __future__ import annotations

import time

from meshwright.processes import gather, is_main, process_count
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.interrupt import Interrupt


class Limits:
    """Decides, the same in every process, whether a run is over.

    Args:
        updates: the last update; None if only time will tell.
        seconds: how long the run may take, by the clock of process 0; None for no limit.
        callbacks: who may ask to stop.
        interrupt: whether a signal asked to stop.
    """

    def __init__(
        self,
        updates: int | None,
        seconds: float | None,
        callbacks: Callback,
        interrupt: Interrupt | None = None,
    ) -> None:
        self.updates = updates
        self._interrupt = interrupt or Interrupt()
        self.seconds = seconds
        self._callbacks = callbacks
        self._started = time.monotonic()

    @property
    def urgent(self) -> bool:
        """Whether to ask after this update already; several processes wait for the next look."""
        return process_count() == 1 and bool(self._interrupt.reason)

    def reason(self) -> str:
        """Return why the run should stop now, as one process said; empty to go on.

        Every process must ask at the same update.
        """
        own = self._interrupt.reason or self._callbacks.should_stop() or self._out_of_time()
        if process_count() == 1:
            return own
        return next((said for said in gather(own) if said), "")

    def _out_of_time(self) -> str:
        if self.seconds is None or not is_main():
            return ""
        spent = time.monotonic() - self._started
        return f"{self.seconds:g} s have passed" if spent >= self.seconds else ""
