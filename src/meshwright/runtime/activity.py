"""Long activities, shown while they run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.text.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console

MENTIONED_SECONDS = 1.0
"""A shorter activity gets no line of its own."""
STILL_SECONDS = 15.0
"""Outside a terminal, a long activity is reported after this time, then at ever longer
intervals."""


@dataclass
class _Shared:
    """What is being done, how far it is, and the console that shows it, unless a ``bar`` does."""

    what: str = ""
    detail: str = ""
    started: float = 0.0
    console: Console | None = None
    bar: bool = False


_now = _Shared()


@contextmanager
def activity(what: str, *, afterwards: bool = True) -> Generator[Callable[[str], None]]:
    """Show what is being done inside, and afterwards how long it took, unless its result is shown.

    An activity inside another is a part of it: it is not shown, but its details are shown as those
    of the outer one. Yields a function that takes the progress as text. Also a decorator.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    if _now.what:
        yield lambda detail: _set_detail(f"{what}, {detail}")
        return
    _now.what, _now.detail, _now.started = what, "", time.monotonic()
    try:
        with _shown():
            yield _set_detail
        shown = afterwards and _now.console is not None and not _now.bar
        if shown and _elapsed() >= MENTIONED_SECONDS:
            _print(current_activity())
    finally:
        _now.what = ""


def _set_detail(detail: str) -> None:
    _now.detail = detail


def current_activity() -> str:
    """Return what is being done and for how long: ``compiling the step … 14 s``; empty if nothing.

    The time is left out in the first second.
    """
    if not _now.what:
        return ""
    seconds = _elapsed()
    what = ", ".join(filter(None, (_now.what, _now.detail)))
    if seconds < MENTIONED_SECONDS:
        return f"{what} …"
    return f"{what} … {human_seconds(seconds) if seconds >= 60 else f'{seconds:.1f} s'}"


@contextmanager
def show_activities(console: Console | None = None) -> Generator[None]:
    """Show the activities inside on a console; by default on stderr."""
    if console is None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
    before, _now.console = _now.console, console
    try:
        yield
    finally:
        _now.console = before


def show_on_terminal() -> AbstractContextManager[None]:
    """Show the activities inside if stderr is a terminal, unless they are shown already."""
    here = _now.console is None and sys.stderr.isatty()
    return show_activities() if here else nullcontext()


def leave_to_bar(taken: bool) -> None:
    """Leave showing activities to a progress bar, which has the terminal; or take it back."""
    _now.bar = taken


def _shown() -> AbstractContextManager[object]:
    if _now.console is None or _now.bar:
        return nullcontext()
    return _live_line(_now.console) if _now.console.is_terminal else _still_lines()


def _live_line(console: Console) -> AbstractContextManager[object]:
    from rich.live import Live
    from rich.text import Text

    return Live(
        console=console,
        get_renderable=lambda: Text(current_activity(), style="dim", no_wrap=True),
        refresh_per_second=4,
        transient=True,
        # Other output appears above the line instead of overwriting it.
        redirect_stdout=False,
        redirect_stderr=True,
    )


@contextmanager
def _still_lines() -> Generator[None]:
    """Report that a long activity continues, so that a log does not look dead."""
    done = threading.Event()

    def say_still() -> None:
        seconds = STILL_SECONDS
        while not done.wait(seconds):
            _print(f"{current_activity()} so far")
            seconds *= 2

    thread = threading.Thread(target=say_still, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _print(line: str) -> None:
    from rich.text import Text

    if _now.console is not None:
        # Soft wrapping keeps it on one line of a log.
        _now.console.print(Text(line, style="dim"), soft_wrap=True)


def _elapsed() -> float:
    return time.monotonic() - _now.started
