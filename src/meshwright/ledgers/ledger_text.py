"""A ledger as text: one table of axes, one of modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from meshwright.columns import Columns, as_text
from meshwright.mesh.axes import describe_sizes
from meshwright.units import human_bytes

if TYPE_CHECKING:
    from meshwright.ledgers.ledger_records import Ledger

SHOWN_MODULES = 12


def ledger_text(ledger: Ledger) -> str:
    """Return what each axis and each module sends, next to the minimum."""
    return as_text(
        Group(
            f"{describe_sizes(ledger.mesh)}, bytes each device sends per update",
            axes_table(ledger),
            *beyond_minimum(ledger),
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
        )
        for axis, own in ledger.axes.items()
    ]
    head = ("axis", "devices", "sent", "needed", "ratio")
    return Columns(head, rows, right=head[1:])


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
