"""Ledgers: what a compiled step sends over each mesh axis, and the theoretical minimum."""

from meshwright.ledgers.ledger_records import AxisLedger, Ledger, Line, ModuleLedger
from meshwright.ledgers.make_ledger import ledger, lower_step, make_ledger, read_ledger

__all__ = [
    "AxisLedger",
    "Ledger",
    "Line",
    "ModuleLedger",
    "ledger",
    "lower_step",
    "make_ledger",
    "read_ledger",
]
