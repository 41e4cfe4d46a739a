"""When a run ends: after a number of updates, a time, a signal, or when a callback asks."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from meshwright.processes import gather, is_main, process_count
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.interrupt import Interrupt


@dataclass(frozen=True)
class Stop:
    """Why a run stops.

    Attributes:
        reason: the reason, as text.
        interrupted: whether a signal stopped it; then only the state is saved.
    """

    reason: str
    interrupted: bool


class Limits:
    """Decides when a run ends, identically in every process.

    Args:
        updates: the last update; None for no limit.
        seconds: the time limit, by the clock of process 0; None for no limit.
        callbacks: callbacks that may stop the run.
        interrupt: records a signal to stop.
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
        """Whether to call `stop` at once; several processes wait for the next logged update."""
        return process_count() == 1 and bool(self._interrupt.reason)

    def stop(self) -> Stop | None:
        """Return why to stop now, identically in every process; None to continue.

        Every process must call it after the same update. A signal to one of them stops all.
        """
        signalled = self._interrupt.reason
        reason = signalled or self._callbacks.should_stop() or self._out_of_time()
        own = Stop(reason, bool(signalled))
        stops = [own] if process_count() == 1 else [Stop(**each) for each in gather(asdict(own))]
        stops = [each for each in stops if each.reason]
        return next((each for each in stops if each.interrupted), next(iter(stops), None))

    def _out_of_time(self) -> str:
        if self.seconds is None or not is_main():
            return ""
        spent = time.monotonic() - self._started
        return f"{self.seconds:g} s have passed" if spent >= self.seconds else ""
