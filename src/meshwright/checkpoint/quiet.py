"""Orbax without its log, and without the tracebacks of operations that a failure interrupts.

Orbax closes its event loop at the first error. TensorStore then prints a traceback for each array
whose reading or writing ends later, and Python one for each that no one waits for any more. The
first error is reported by the caller.
"""

import gc
import logging
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

LATE_SECONDS = 0.2
"""How long other operations may continue after one has failed."""


def silence_orbax() -> None:
    """Log nothing of Orbax, and drop the tracebacks of what ends too late."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    if not isinstance(sys.excepthook, _WithoutLateCallbacks):
        sys.excepthook = _WithoutLateCallbacks(sys.excepthook)


@contextmanager
def quiet_failures() -> Generator[list[Any]]:
    """Drop what is printed about operations that the failure of another one interrupted.

    Yields a list to which the block appends its error.
    """
    before, log = sys.unraisablehook, logging.getLogger("asyncio")
    sys.unraisablehook, log.disabled = (lambda *_: None), True
    failures: list[Any] = []
    try:
        yield failures
        if failures:
            time.sleep(LATE_SECONDS)
            gc.collect()
    finally:
        sys.unraisablehook, log.disabled = before, False


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace))
    return not any(name.startswith("orbax.") for name in names)


class _WithoutLateCallbacks:
    """An exception hook that drops one message, and passes all others on.

    Such callbacks come from threads of TensorStore, at any time after a failure.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            self._original(kind, error, trace)
