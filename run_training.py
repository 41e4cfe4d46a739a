"""Trains what the command line describes, like `meshwright train`: a start for a script of yours.

python run_training.py model=gpt2_tiny model.mesh_shape=[[4,1],["fsdp","tp"]] simulate=4
python -m meshwright.launch --nprocs=4 run_training.py model=gpt2_tiny mesh.fsdp=4 mesh.data=1
"""

import sys

from meshwright.cli.main import entry

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    entry()
