"""`python -m meshwright.drill.worker train …`: a training command in which a fault happens.

Only drills start it. It is the one place that puts faults into a process, before the command runs
as always; `meshwright` itself knows nothing of them.
"""

from __future__ import annotations

import runpy

from meshwright.drill.fault_table import FAULTS
from meshwright.drill.hooks import Hooks

if __name__ == "__main__":
    hooks = Hooks.of_this_process()
    hooks.note_process()
    if hooks.told.fault:
        FAULTS[hooks.told.fault].inject(hooks)
    else:
        hooks.note_batch()
    runpy.run_module("meshwright", run_name="__main__")
