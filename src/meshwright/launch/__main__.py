"""`python -m meshwright.launch --nprocs=4 run_training.py …`: the same as `meshwright launch`."""

import runpy
import sys

sys.argv[1:1] = ["launch"]
runpy.run_module("meshwright", run_name="__main__")
