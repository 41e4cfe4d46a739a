"""Ledgers: what a compiled step sends over each mesh axis, and the theoretical minimum."""

from meshwright.ledgers.ledger_records import (
    AxisLedger,
    KindOverlap,
    Ledger,
    Line,
    ModuleLedger,
    NotOverlapped,
)
from meshwright.ledgers.make_ledger import ledger, lower_step, make_ledger, read_ledger

__all__ = [
    "AxisLedger", "KindOverlap", "Ledger", "Line", "ModuleLedger", "NotOverlapped", "ledger",
    "lower_step", "make_ledger", "read_ledger"
]  # fmt: skip
