"""When a run ends: after a number of updates, a time, a signal, or when a callback asks."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from meshwright.processes import gather, is_main, process_count
from meshwright.runtime.interrupt import Interrupt
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.ending.stop import Stop, StopReason
from meshwright.trainer.ending.stop_together import StopTogether


class Limits:
    """Decides when a run ends, identically in every process.

    Args:
        updates: the last update; None for no limit.
        seconds: the time limit, by the clock of process 0; None for no limit.
        callbacks: callbacks that may stop the run.
        interrupt: records a signal to stop.
        whole_data: whether the run is complete when the data ends.
    """

    def __init__(
        self,
        updates: int | None,
        seconds: float | None,
        callbacks: Callback,
        interrupt: Interrupt | None = None,
        *,
        whole_data: bool = False,
    ) -> None:
        self.updates, self.whole_data = updates, whole_data
        self._interrupt = interrupt or Interrupt()
        self.seconds = seconds
        self._callbacks = callbacks
        self._together = StopTogether(self._interrupt) if process_count() > 1 else None
        self._started = time.monotonic()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Listen for signals to other processes inside the block."""
        if self._together is None:
            yield
            return
        with self._together.listening():
            yield

    @property
    def urgent(self) -> bool:
        """Whether to call `stop` at once; several processes agree in `before_update`."""
        return process_count() == 1 and bool(self._interrupt.reason)

    def before_update(self, update: int) -> Stop | None:
        """Return why not to begin this update; the same in every process."""
        if self._together is not None:
            return self._together.before_update(update)
        return self._signalled()

    def stop(self) -> Stop | None:
        """Return why to stop now, identically in every process; None to continue.

        Every process must call it after the same update. A signal to one of them stops all.
        """
        own = self._signalled() or self._asked() or self._out_of_time()
        if process_count() == 1:
            return own
        sent = None if own is None else [own.reason.value, own.text]
        stops = [Stop(StopReason(each[0]), each[1]) for each in gather(sent) if each]
        return next((each for each in stops if each.interrupted), next(iter(stops), None))

    def _signalled(self) -> Stop | None:
        reason = self._interrupt.reason
        return Stop(StopReason.SIGNAL, reason) if reason else None

    def _asked(self) -> Stop | None:
        reason = self._callbacks.should_stop()
        return Stop(StopReason.CALLBACK, reason) if reason else None

    def _out_of_time(self) -> Stop | None:
        if self.seconds is None or not is_main():
            return None
        spent = time.monotonic() - self._started
        if spent < self.seconds:
            return None
        return Stop(StopReason.OUT_OF_TIME, f"{self.seconds:g} s have passed")
