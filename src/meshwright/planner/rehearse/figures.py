"""The figures of a rehearsed step, how each is known, and how far a prediction is from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.hardware import Hardware
from meshwright.ledgers import Ledger
from meshwright.planner.devices.links import axis_links, collective_seconds
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.rehearse.rehearsal import Rehearsal
from meshwright.text.columns import Columns
from meshwright.text.units import human_bytes, human_seconds

Source = Literal["measured", "compiled", "modelled", "measured + modelled"]


@dataclass(frozen=True)
class Figure:
    """One figure of a step.

    Attributes:
        name: what it is.
        value: bytes or seconds.
        unit: which of the two.
        source: how it is known: measured on a device, read from the compiled program, or modelled.
        predicted: what the planner predicts; None without a prediction.
    """

    name: str
    value: float
    unit: Literal["bytes", "seconds"]
    source: Source
    predicted: float | None = None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of the figure; None without a prediction."""
        return None if self.predicted is None else relative_error(self.predicted, self.value)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "error": self.error}


def relative_error(predicted: float, actual: float) -> float | None:
    """Return (predicted - actual) / actual; None if only one of them is zero."""
    if not actual:
        return None if predicted else 0.0
    return predicted / actual - 1


def make_figures(
    rehearsal: Rehearsal, hardware: Hardware | None, estimate: Estimate | None
) -> list[Figure]:
    """Return all figures of a rehearsed step.

    A program for CPUs is compared in what is the same on all devices: state, batch and what is
    sent.

    Args:
        rehearsal: the step.
        hardware: the hardware it is for; None leaves out times of communication.
        estimate: the planner's prediction, if there is one.
    """
    return [*_memory(rehearsal, estimate), *_times(rehearsal, hardware, estimate)]


def figures_table(figures: Sequence[Figure], *, errors: bool = True) -> Columns:
    """Return figures as a table, a row each.

    Args:
        figures: the figures.
        errors: whether to show how far predictions are off.
    """
    head = ("per device and update", "", "how it is known", "predicted", "error")
    rows = [
        (
            f.name,
            _shown(f.value, f.unit),
            f.source,
            "" if f.predicted is None else _shown(f.predicted, f.unit),
            "" if f.predicted is None else percent(f.error),
        )
        for f in figures
    ]
    predicted = any(f.predicted is not None for f in figures)
    shown = 5 if predicted and errors else 4 if predicted else 3
    right = tuple(name for name in ("", "predicted", "error") if name in head[:shown])
    return Columns(head[:shown], [row[:shown] for row in rows], right=right)


def percent(error: float | None) -> str:
    """Return a relative error for reading: ``+3.1%``, or ``exact``."""
    if error is None:
        return "–"
    return "exact" if error == 0 else f"{error:+.1%}"


def sending_seconds(ledger: Ledger, hardware: Hardware) -> dict[str, float]:
    """Return how long what a program sends takes by itself, by axis.

    A collective over several axes counts for the slowest of them.
    """
    links = axis_links(hardware, ledger.mesh)
    seconds = dict.fromkeys(links, 0.0)
    for line in ledger.lines:
        over = [axis for axis in line.axes if axis in links]
        if over and line.count:
            slowest = min(over, key=lambda axis: links[axis].gb_per_s)
            each = line.payload_bytes / line.count
            one = collective_seconds(line.kind, each, links[slowest], hardware)
            seconds[slowest] += line.count * one
    return seconds


def _memory(rehearsal: Rehearsal, estimate: Estimate | None) -> Iterator[Figure]:
    memory, expected = rehearsal.memory, None if estimate is None else estimate.memory
    rest = memory.total - memory.argument
    predicted: list[int | None] = [None] * 4
    if expected is not None:
        predicted[:2] = expected.state, expected.batch
    if expected is not None and rehearsal.for_gpus:
        other = expected.compiled - expected.state - expected.batch
        predicted[2:] = other, expected.compiled
    names = ("state", "batch", "temporary values", "all of the program")
    values = (rehearsal.state, rehearsal.batch, rest, memory.total)
    for name, value, guess in zip(names, values, predicted, strict=True):
        yield Figure(name, value, "bytes", "compiled", guess)
    if rehearsal.measured is not None and rehearsal.measured.peak_bytes is not None:
        total = None if expected is None else expected.total
        peak = rehearsal.measured.peak_bytes
        yield Figure("peak of the memory in use", peak, "bytes", "measured", total)


def _times(
    rehearsal: Rehearsal, hardware: Hardware | None, estimate: Estimate | None
) -> Iterator[Figure]:
    ledger, time = rehearsal.ledger, None if estimate is None else estimate.time
    alone = {} if hardware is None else sending_seconds(ledger, hardware)
    for axis, own in ledger.axes.items():
        traffic = None if time is None else time.traffic.get(axis)
        sent = None if traffic is None else traffic.sent_bytes
        yield Figure(f"sent over {axis}", own.sent_bytes, "bytes", "compiled", sent)
        if axis in alone:
            seconds = traffic.seconds if traffic is not None and rehearsal.for_gpus else None
            yield Figure(f"sending over {axis}", alone[axis], "seconds", "modelled", seconds)
    exposed = sum(
        seconds * (1 - (ledger.axes[axis].overlapped or 0.0)) for axis, seconds in alone.items()
    )
    if rehearsal.measured is None:
        if time is not None and rehearsal.for_gpus:
            own = time.compute + time.bubble + exposed
            yield Figure("update", own, "seconds", "modelled", time.step)
        elif time is not None:
            yield Figure("update", time.step, "seconds", "modelled")
        return
    compute = rehearsal.measured.compute_seconds
    yield Figure("computing", compute, "seconds", "measured", time and time.compute)
    if alone or not ledger.axes:
        source: Source = "measured + modelled" if alone else "measured"
        yield Figure("update", compute + exposed, "seconds", source, time and time.step)


def _shown(value: float, unit: str) -> str:
    return human_bytes(value) if unit == "bytes" else human_seconds(value)
