"""The ledger: what a compiled step sends over each mesh axis, and the theoretical minimum."""

from meshwright.ledger.ledger import (
    AxisLedger,
    Ledger,
    Line,
    lower_step,
    make_ledger,
    read_ledger,
)

__all__ = ["AxisLedger", "Ledger", "Line", "lower_step", "make_ledger", "read_ledger"]
