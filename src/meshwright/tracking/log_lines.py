"""Plain lines of text: for log files, and for output that is not a terminal."""

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from meshwright.text.masking import mask_text
from meshwright.text.units import human_bytes, human_count, human_seconds
from meshwright.tracking.tracker import Tracker

SHOWN_EVENTS = (
    "start", "sample", "restart", "processes", "weights", "resume", "checkpoint", "warning",
    "incident", "note", "mixture", "profile", "stop",
)  # fmt: skip
"""Events that are shown; an evaluation is shown by its metrics."""


class LineTracker(Tracker):
    """Writes aligned lines, with or without the time in front; the caller shows the result."""

    def __init__(
        self,
        write: Callable[[str], None],
        folder: Path | None,
        *,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._folder = folder
        self._pace = Pace(total_steps, clock)

    def start(self, facts: Mapping[str, Any]) -> None:
        """Write what is trained, on which devices, and where the output goes."""
        for line in format_facts(facts, self._folder):
            self._write(line)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics side by side."""
        self._write(format_metrics_line(split, step, values, self._pace))

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Write what happened."""
        if line := format_event(kind, step, message):
            self._write(line)


class LogFile(LineTracker):
    """Appends the same lines to train.log in the run folder, each with its time."""

    def __init__(self, folder: Path, *, total_steps: int | None) -> None:
        super().__init__(self._append, folder, total_steps=total_steps)
        self._path = folder / "train.log"
        self._file: TextIO | None = None

    def close(self, result: Mapping[str, Any]) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")


class WarningsOnly(Tracker):
    """Passes warnings to Python's `warnings`, for a run without progress output."""

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Warn at the user's line that started the run."""
        if kind == "warning" or (kind == "incident" and details.get("action") != "stop"):
            at = f" (step {step})" if step else ""
            warnings.warn(f"{mask_text(message)}{at}", UserWarning, stacklevel=levels_inside())


class Pace:
    """Estimates the remaining time.

    Time before the first call is not counted, because it includes compilation.
    """

    def __init__(self, total_steps: int | None, clock: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds_left(self, step: int) -> float | None:
        """Return the seconds until the last step; None if unknown, or after it."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first, started = self._first
        if self.total_steps is None or not first < step < self.total_steps:
            return None
        return (now - started) / (step - first) * (self.total_steps - step)

    def count(self, step: int) -> str:
        """Return ``120/500``, padded so that counts line up."""
        if self.total_steps is None or step > self.total_steps:
            return f"{step:>7}"
        width = len(str(self.total_steps))
        return f"{step:>{width}}/{self.total_steps}"


def levels_inside() -> int:
    """Return the stack level of the first caller outside this package."""
    package = __name__.partition(".")[0]
    frame, level, deepest = inspect.currentframe(), 0, 0
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            deepest = level
        frame, level = frame.f_back, level + 1
    return deepest + 1


def format_facts(facts: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Return the known facts of a run as lines."""
    lines: list[str] = []
    if plan := facts.get("plan"):
        lines.append(f"plan        {plan}")
    if devices := facts.get("devices"):
        kind = devices.get("kind") or devices.get("platform") or ""
        processes = devices.get("processes") or 1
        shared = f" in {processes} processes" if processes > 1 else ""
        lines.append(f"devices     {devices.get('count')} × {kind}{shared}")
    if parameters := facts.get("parameters"):
        count, size = parameters.get("count") or 0, parameters.get("bytes") or 0
        frozen = parameters.get("frozen") or 0
        trained = f"trained of {human_count(count + frozen)}, " if frozen else ""
        shown = f"{human_count(count)} ({count:,}) {trained}".rstrip(", ")
        lines.append(f"parameters  {shown}, {human_bytes(size)}")
    if memory := _format_memory(facts.get("memory_per_device") or {}):
        lines.append(f"memory      {memory}")
    if description := (facts.get("dataset") or {}).get("description"):
        lines.append(f"data        {description}")
    return lines if folder is None else [*lines, f"output      {folder.absolute()}"]


def _format_memory(memory: Mapping[str, Any]) -> str:
    parts = {k: v for k, v in memory.items() if k != "total" and v}
    total = memory.get("total") or sum(parts.values())
    held = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
    return f"{human_bytes(total)} per device: {held}" if parts else ""


def format_metrics_line(split: str, step: int, values: Mapping[str, float], pace: Pace) -> str:
    """Return the metrics of one step as a line."""
    words = format_metrics(values)
    if split == "train":
        left = pace.seconds_left(step)
        words += [f"ETA {human_seconds(left)}"] if left is not None else []
    return f"{split:<5} {pace.count(step)}  {'  '.join(words)}".rstrip()


def format_event(kind: str, step: int, message: str) -> str:
    """Return an event as a line; empty for events that are not shown."""
    if kind not in SHOWN_EVENTS:
        return ""
    at = f" (step {step})" if step and kind != "start" else ""
    return f"{kind}: {mask_text(message)}{at}"


HIDDEN = ("input_wait_share", "flops_per_second")
"""Metrics that are only written to files, to keep lines short."""


def format_metrics(values: Mapping[str, float]) -> list[str]:
    """Return metrics as padded texts: known ones first, then those of the task."""
    known = [
        text(values[name]).ljust(width)
        for name, (width, text) in _FORMATS.items()
        if name in values
    ]
    own = [
        f"{name} {value:.4g}".ljust(len(name) + 7)
        for name, value in values.items()
        if name not in _FORMATS and name not in HIDDEN
    ]
    return known + own


_FORMATS: dict[str, tuple[int, Callable[[float], str]]] = {
    "loss": (12, lambda v: f"loss {v:.4f}"),
    "eval_samples": (12, lambda v: f"{v:,.0f} sample{'' if v == 1 else 's'}"),
    "learning_rate": (10, lambda v: f"lr {v:.2e}"),
    "grad_norm": (10, lambda v: f"grad {v:.3g}"),
    "samples_per_second": (15, lambda v: f"{human_count(v)} samples/s"),
    "tokens_per_second": (14, lambda v: f"{human_count(v)} tokens/s"),
    "step_seconds": (12, lambda v: f"{human_seconds(v)}/step"),
    "mfu": (9, lambda v: f"MFU {v:.1%}"),
    "memory_bytes": (9, human_bytes),
}
"""Known metrics in the order they are shown: column width, and the text of a value."""
