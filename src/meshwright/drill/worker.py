"""`python -m meshwright.drill.worker train …`: a training command into which a fault is injected.

Only drills and tests of faults start it. It registers the fault with the hooks of training, and
then runs the command as always; `meshwright` itself knows nothing of faults.
"""

import runpy

from meshwright.drill.fault_makers import IN_PROCESS
from meshwright.drill.process import DrilledProcess

if __name__ == "__main__":
    process = DrilledProcess.this()
    process.note_process()
    if process.instructions.fault:
        IN_PROCESS[process.instructions.fault](process)
    else:
        process.note_batch()
    runpy.run_module("meshwright", run_name="__main__")
