"""Interruption by a signal: the run stops after the current update, and saves its state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE = b"\nstopping after this update, to save the state; once more stops at once\n"


class Interrupt:
    """Records a signal to stop; a second signal stops at once.

    Attributes:
        signal: the number of the signal; None if there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def reason(self) -> str:
        """Why to stop; empty to continue."""
        return "" if self.signal is None else stop_reason(self.signal)

    @contextmanager
    def watch(self) -> Generator[None]:
        """Handle signals inside the block; outside the main thread this does nothing.

        The handler writes to the stderr file descriptor directly: the interrupted code may hold
        the locks of Python's streams and loggers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            if self.signal is not None:
                # The second signal: stop at once, as without this handler.
                _call_original(before[number], number, frame)
                return
            self.signal = number
            with suppress(OSError):
                os.write(STDERR, _MESSAGE)

        before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_reason(number: int) -> str:
    """Return the reason to stop that a signal is."""
    return f"{signal.Signals(number).name} asked to stop"


def _call_original(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
