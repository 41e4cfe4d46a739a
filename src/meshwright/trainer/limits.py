"""When a run ends: after so many updates, after some time, or when a callback asks for it."""

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
        reason: for people.
        interrupted: whether a signal asked for it, so that only the state is saved.
    """

    reason: str
    interrupted: bool


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

    def stop(self) -> Stop | None:
        """Say why the run should stop now, the same in every process; None to go on.

        Every process must ask at the same update. A signal to one of them stops all.
        """
        signalled = self._interrupt.reason
        reason = signalled or self._callbacks.should_stop() or self._out_of_time()
        own = Stop(reason, bool(signalled))
        said = [own] if process_count() == 1 else [Stop(**each) for each in gather(asdict(own))]
        reasons = [each for each in said if each.reason]
        return next((each for each in reasons if each.interrupted), next(iter(reasons), None))

    def _out_of_time(self) -> str:
        if self.seconds is None or not is_main():
            return ""
        spent = time.monotonic() - self._started
        return f"{self.seconds:g} s have passed" if spent >= self.seconds else ""
