"""Being asked to stop: a signal ends the update in flight, and the state is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    def watch(self, say: Callable[[str], None]) -> Generator[None]:
        """Watch for signals inside the block; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal is not None:
                # Asked twice: whoever waits for the first answer does not wait for the second.
                _pass_on(before[number], number, frame)
                return
            self.signal = number
            say("stopping after this update, to save the state; once more stops at once")

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
