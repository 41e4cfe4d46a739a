"""Row 30: processes that were not started by `meshwright launch` lose one of them."""

import os
import subprocess
import sys

import pytest
from real_processes import free_port

pytestmark = [pytest.mark.full, pytest.mark.faults]

LIMIT_SECONDS = 120
PROGRAM = """
import os, sys, time
import jax, numpy as np, optax
from flax import nnx
from meshwright.processes import connect
address, me, lost, how, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
jax.config.update("jax_num_cpu_devices", 1)
connect(address, 3, me)
import meshwright as mw

def data(step, batch_size):
    if step == 20 and me == lost:
        if how == "killed":
            os.kill(os.getpid(), 9)
        return None
    time.sleep(0.02)
    return {"x": np.ones((batch_size, 4), "float32")}

trainer = mw.Trainer(
    model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    optimizer=optax.sgd(0.1),
)
trainer.fit(data, batch_size=6, steps=60, run_dir=folder, progress=False)
"""


@pytest.mark.parametrize("how", ["killed", "none"])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_name_the_lost_process_the_step_and_the_remedy(tmp_path, lost, how):
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(me), str(lost), how, str(tmp_path)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for me in range(3)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    assert codes[lost] == (-9 if how == "killed" else 1), texts[lost]
    for me in {0, 1, 2} - {lost}:
        role = " (the coordinator)" if lost == 0 else ""
        assert f"process {me} lost process {lost}{role} at step " in texts[me]
        assert "start all processes again with the same command" in texts[me]
        assert ("batch 20 (data(step=20)) is None" in texts[me]) == (how == "none")
        assert "Check failure stack trace" not in texts[me]
        assert codes[me] == 1
