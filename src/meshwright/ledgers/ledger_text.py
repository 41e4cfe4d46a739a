"""A ledger as text: one table of axes, one of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.mesh.axes import describe_sizes
from meshwright.units import human_bytes

if TYPE_CHECKING:
    from meshwright.ledgers.ledger_records import Ledger

SHOWN_MODULES = 12


def ledger_text(ledger: Ledger) -> str:
    """Return what each axis and each module sends, next to the minimum."""
    axes = [
        [axis, str(own.size), human_bytes(own.sent_bytes), human_bytes(own.minimum_bytes),
         _ratio(own.ratio)]
        for axis, own in ledger.axes.items()
    ]  # fmt: skip
    modules = [
        [name or "outside modules", axis, human_bytes(module.sent_bytes),
         human_bytes(module.minimum_bytes)]
        for axis, own in ledger.axes.items()
        for name, module in list(own.modules.items())[:SHOWN_MODULES]
    ]  # fmt: skip
    beyond = [
        f"beyond the minimum on {axis}: {line}"
        for axis, own in ledger.axes.items()
        for line in own.excess
    ]
    return "\n".join(
        [
            f"{describe_sizes(ledger.mesh)}, bytes each device sends per update",
            *_table(["axis", "devices", "sent", "needed", "ratio"], axes, left=1),
            *beyond,
            *explanations(ledger),
            "",
            *_table(["module", "axis", "sent", "needed"], modules, left=2),
        ]
    )


def explanations(ledger: Ledger) -> list[str]:
    """Return why modules send more than the minimum, a line each."""
    return [
        f"{human_bytes(part.sent_bytes)} more on {axis}, {name or 'outside modules'}: {part.reason}"
        for axis, own in ledger.axes.items()
        for name, module in own.modules.items()
        for part in module.explained
    ]


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}"


def _table(head: list[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return aligned lines; the first ``left`` columns are texts, the others numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
