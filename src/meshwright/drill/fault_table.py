"""The table of faults, in the order in which a drill goes through them."""

from __future__ import annotations

from meshwright.drill.fault import Fault
from meshwright.drill.faults import (
    asked_to_stop,
    damaged,
    failing,
    hanging,
    joining,
    killed,
    killed_saving,
    nan_batch,
    resized,
    unwritable,
)

_MODULES = (
    killed,
    killed_saving,
    asked_to_stop,
    hanging,
    failing,
    damaged,
    unwritable,
    nan_batch,
    joining,
    resized,
)

FAULTS: dict[str, Fault] = {fault.name: fault for module in _MODULES for fault in module.FAULTS}
"""All faults by name."""
