"""A ledger as text: one table of axes, one of modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from meshwright.mesh.axes import describe_sizes
from meshwright.text.columns import Columns, as_text
from meshwright.text.units import human_bytes

if TYPE_CHECKING:
    from meshwright.ledgers.ledger_records import AxisLedger, Ledger

SHOWN_MODULES = 12
SHOWN_BLOCKS = 4

_FAMILIES = {
    "all-gather": "gathers",
    "reduce": "reductions",
    "collective-permute": "permutes",
    "all-to-all": "all-to-alls",
}


def ledger_text(ledger: Ledger) -> str:
    """Return what each axis and each module sends, next to the minimum."""
    return as_text(
        Group(
            f"{describe_sizes(ledger.mesh)}, bytes each device sends per update",
            axes_table(ledger),
            *beyond_minimum(ledger),
            *overlap_lines(ledger),
            "",
            _modules_table(ledger),
        )
    )


def axes_table(ledger: Ledger) -> Columns:
    """Return what each axis sends, next to the minimum."""
    rows = [
        (
            axis,
            str(own.size),
            human_bytes(own.sent_bytes),
            human_bytes(own.minimum_bytes),
            Text(
                "–" if own.ratio is None else f"{own.ratio:.3f}",
                style="bold red" if own.suspicious else "green",
            ),
            _overlapped(own),
        )
        for axis, own in ledger.axes.items()
    ]
    head = ("axis", "devices", "sent", "needed", "ratio", "overlapped")
    return Columns(head, rows, right=head[1:-1])


def _overlapped(own: AxisLedger) -> str:
    """Return which part of what an axis sends is sent while the device computes."""
    shares = [
        f"{part.overlapped:.0%} of {_FAMILIES.get(kind, kind)}"
        for kind, part in own.overlap.items()
    ]
    return ", ".join(shares) or "–"


def beyond_minimum(ledger: Ledger) -> list[str]:
    """Return what is sent beyond the minimum, and why where that is known, a line each."""
    excess = [
        f"beyond the minimum on {axis}: {line}"
        for axis, own in ledger.axes.items()
        for line in own.excess
    ]
    explained = [
        f"{human_bytes(part.sent_bytes)} more on {axis}, {name or 'outside modules'}: {part.reason}"
        for axis, own in ledger.axes.items()
        for name, module in own.modules.items()
        for part in module.explained
    ]
    return excess + explained


def overlap_lines(ledger: Ledger) -> list[str]:
    """Return the largest collectives during which nothing is computed, or why none are known."""
    if ledger.overlap_unknown and ledger.axes:
        return [f"what overlaps with computing is not known: {ledger.overlap_unknown}"]
    return [
        f"not overlapped on {'×'.join(each.axes)}: {each.kind} of {human_bytes(each.sent_bytes)}"
        + (f" in {each.count} iterations" if each.count > 1 else "")
        + f", {_listed(each.modules)} ({each.phase})"
        for each in ledger.not_overlapped
    ]


def _listed(modules: list[str]) -> str:
    if len(modules) <= SHOWN_BLOCKS:
        return ", ".join(modules) or "outside modules"
    shown = modules[: SHOWN_BLOCKS - 1]
    return f"{', '.join(shown)} and {len(modules) - len(shown)} more"


def _modules_table(ledger: Ledger) -> Columns:
    rows = [
        (
            name or "outside modules",
            axis,
            human_bytes(module.sent_bytes),
            human_bytes(module.minimum_bytes),
        )
        for axis, own in ledger.axes.items()
        for name, module in list(own.modules.items())[:SHOWN_MODULES]
    ]
    head = ("module", "axis", "sent", "needed")
    return Columns(head, rows, right=head[2:])
