"""Being asked to stop: a signal ends the update in flight, and the state is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ANSWER = b"\nstopping after this update, to save the state; once more stops at once\n"


class Interrupt:
    """Notes that a signal asked to stop; a second one stops at once.

    Attributes:
        signal: the number of the signal; None if there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def reason(self) -> str:
        """Why to stop; empty to go on."""
        return "" if self.signal is None else f"{signal.Signals(self.signal).name} asked to stop"

    @contextmanager
    def watch(self) -> Generator[None]:
        """Watch for signals inside the block; only the main thread of a process can.

        Who asked is answered on stderr itself: whatever the signal has interrupted may hold the
        locks of everything else that could tell.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal is not None:
                # Asked twice: whoever waits for the first answer does not wait for the second.
                _pass_on(before[number], number, frame)
                return
            self.signal = number
            with suppress(OSError):
                os.write(STDERR, _ANSWER)

        before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _pass_on(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
