"""Traces made by hand, with the names real ones use."""

from types import SimpleNamespace
from typing import Any


def event(name: str, start: float, end: float, **stats: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, start_ns=start, duration_ns=end - start, stats=list(stats.items())
    )


def line(name: str, *events: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, events=list(events))


def plane(name: str, *lines: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, lines=list(lines))


def mark(start: float, end: float) -> SimpleNamespace:
    """The host's plane, with the time a profile is about."""
    return plane("/host:CPU", line("python", event("meshwright profile", start, end)))
