"""Interruption by a signal: a run stops after the current step, and saves its state."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from typing import Any

from meshwright.errors import ExitCode

STDERR = 2
PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of a cluster that needs the machine; SIGUSR1 is how SLURM announces the time limit."""
_SIGNALS = (signal.SIGINT, *PREEMPTIONS)
_SAVING = "\nstopping after this step, to save the state; a second signal stops at once\n"
_NOTHING_LOST = (
    "\n{name} before the first step: stopped, and nothing is lost; the same command starts again\n"
)
_END_OF_BYTES = b"\0"


class Phase(Enum):
    """What a signal does."""

    STARTING = "nothing is lost yet: end at once"
    TRAINING = "record it, so that the run saves its state and ends"
    ENDED = "the state is saved: do what the signal does without a handler"


class Interrupt:
    """Records a signal to stop; a second signal stops at once. ``phase`` is what one does now."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.phase = Phase.TRAINING
        self._before: dict[int, Any] = {}
        # A signal is counted by its handler, which runs in the main thread once that is back in
        # Python, and in a command also by a thread, which need not wait for the main thread.
        self._handled = self._read = 0
        self._counting = threading.RLock()
        self._is_command = False
        self._own_process = os.getpid()

    @property
    def reason(self) -> str:
        """Why to stop; empty to continue."""
        return "" if self.signal is None else stop_text(self.signal)

    @contextmanager
    def watch(self) -> Generator[None]:
        """Handle signals inside the block; outside the main thread this does nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        if self._before[signal.SIGUSR1] is not signal.SIG_DFL:
            # A program's own use of the signal, such as dumping its stacks.
            del self._before[signal.SIGUSR1]
        for number in self._before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}

    @contextmanager
    def watch_command(self) -> Generator[None]:
        """Handle the signals to a whole command, which starts with nothing to lose.

        A thread reads them as they arrive: compiling and connecting are long calls out of Python,
        during which no handler runs.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.phase, self._is_command = Phase.STARTING, True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        thread.start()
        token = _current.set(self)
        with self.watch():
            before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                _current.reset(token)
                os.write(writer, _END_OF_BYTES)
                thread.join()
                os.close(reader)
                os.close(writer)

    def _handle(self, number: int, frame: Any) -> None:
        ended = self.phase is Phase.ENDED and self.signal is None
        if os.getpid() != self._own_process or ended:
            _call_original(self._before[number], number, frame)
            return
        with self._counting:
            self._handled += 1
            first_seen = self._handled > self._read
        if self._handled > 1 and not self._is_command:
            # Stop at once, as without this handler.
            _call_original(self._before[number], number, frame)
        elif first_seen:
            self._received(number, self._handled)

    def _listen(self, reader: int) -> None:
        while (byte := os.read(reader, 1)) not in (b"", _END_OF_BYTES):
            if byte[0] not in self._before or (self.phase is Phase.ENDED and self.signal is None):
                continue
            with self._counting:
                self._read += 1
                first_seen = self._read > self._handled
            if first_seen:
                self._received(byte[0], self._read)

    def _received(self, number: int, count: int) -> None:
        """Act on a signal.

        This writes to the stderr file descriptor directly: the interrupted code may hold the locks
        of Python's streams and loggers.
        """
        if count > 1:
            os._exit(128 + number)
        starting = self.phase is Phase.STARTING
        self.signal = number
        text = _NOTHING_LOST if starting else _SAVING
        with suppress(OSError):
            os.write(STDERR, text.format(name=signal.Signals(number).name).encode())
        if starting:
            os._exit(ExitCode.PREEMPTED)


_current: ContextVar[Interrupt | None] = ContextVar("interrupt", default=None)


def current_interrupt() -> Interrupt | None:
    """Return what watches the signals of the command that is running; None in a Python program."""
    return _current.get()


def _call_original(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def stop_text(number: int) -> str:
    """Return the reason to stop that a signal gives."""
    return f"{signal.Signals(number).name} asked to stop"
