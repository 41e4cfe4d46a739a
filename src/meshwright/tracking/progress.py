"""A progress bar in the terminal."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.runtime.activity import current_activity, leave_to_bar
from meshwright.text.columns import Indented
from meshwright.text.units import human_seconds
from meshwright.tracking.log_lines import (
    Pace,
    format_event,
    format_facts,
    format_metrics,
    format_metrics_line,
)
from meshwright.tracking.tracker import Tracker

_STYLES = {"warning": "yellow", "incident": "yellow", "stop": "bold"}


class ProgressTracker(Tracker):
    """Keeps a bar with the newest metrics at the bottom of a terminal.

    Evaluations and events scroll by above it.
    """

    def __init__(
        self,
        console: Console,
        folder: Path | None,
        *,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._folder = folder
        self._clock = clock
        self._pace = Pace(total_steps, clock)
        self._step = 0
        self._values: dict[str, float] = {}
        self._left: float | None = None
        self._live: Live | None = None
        self._started = clock()

    def start(self, facts: Mapping[str, Any]) -> None:
        """Print the facts and show the bar."""
        for line in format_facts(facts, self._folder):
            self._console.print(Indented(line, 12, first=0))
        self._started = self._clock()
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=2,
            # Other output appears above the bar instead of overwriting it.
            redirect_stdout=False,
            redirect_stderr=True,
        )
        self._live.start()
        leave_to_bar(True)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Advance the bar; print an evaluation above it."""
        if split == "train":
            self._step, self._values = step, dict(values)
            self._left = self._pace.seconds_left(step)
        else:
            self._console.print(Text(format_metrics_line(split, step, values, self._pace)))

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Print what happened above the bar."""
        if line := format_event(kind, step, message):
            self._console.print(Indented(line, 2, _STYLES.get(kind, "dim"), first=0))

    def close(self, result: Mapping[str, Any]) -> None:
        """Stop updating the bar and release the terminal."""
        if self._live is not None:
            leave_to_bar(False)
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """Return the bar, the elapsed and remaining time, and the newest metrics."""
        total = self._pace.total_steps
        bar = ProgressBar(total, self._step, pulse=not total, animation_time=self._clock())
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        left = "" if self._left is None else f", ETA {human_seconds(self._left)}"
        elapsed = human_seconds(self._clock() - self._started)
        row.add_row(bar, Text(f"{self._pace.count(self._step).strip()}  {elapsed}{left}"))
        values = " · ".join(text.strip() for text in format_metrics(self._values))
        busy = current_activity() or values or "waiting for the first step"
        return Group(row, Text(busy, style="dim"))
