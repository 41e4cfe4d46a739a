"""A signal to one of several real processes stops all of them, after the same step."""

import pytest
from real_processes import run_processes

PROGRAM = """
import json, os, signal, sys, time
import jax, numpy as np, optax
from flax import nnx
from meshwright.processes import connect
jax.config.update("jax_num_cpu_devices", 1)
me = int(sys.argv[2])
connect(sys.argv[1], 2, me)
import meshwright as mw

SIGNALLED = json.loads(sys.argv[3])

def data(step, batch_size):
    # Processes are not equally fast, and only some of them get the signal.
    time.sleep(0.01 + 0.01 * me)
    if step == 20 and me in SIGNALLED:
        os.kill(os.getpid(), signal.SIGTERM)
    return {"x": np.ones((batch_size, 4), "float32")}

trainer = mw.Trainer(
    model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    optimizer=optax.sgd(0.1),
    log_every=1_000_000,
)
def run(folder):
    try:
        trainer.fit(
            data, batch_size=4, steps=100_000, run_dir=folder, restart=True, progress=False
        )
    except SystemExit as stop:
        assert stop.code == 75
    return trainer.result

runs = [run(f"{sys.argv[4]}/{n}") for n in range(int(sys.argv[5]))]
jax.distributed.shutdown()
print(json.dumps([[run.steps, run.interrupted, run.stopped] for run in runs]))
"""


# Signals to one process are tested every day, and to one of several in tests/faults.
@pytest.mark.full
def test_all_stop_after_the_same_step_soon_after_a_signal_to_one(tmp_path):
    first, second = run_processes(PROGRAM, ["[1]", str(tmp_path), "1"], count=2)
    assert first == second
    for number, (steps, interrupted, stopped) in enumerate(first):
        assert (interrupted, stopped) == (True, "SIGTERM asked to stop")
        # The request is read every 0.2 s, and a step takes 0.02 s.
        assert 15 < steps < 80
        assert (tmp_path / str(number) / "checkpoints" / str(steps)).is_dir()


@pytest.mark.full
def test_all_stop_after_the_same_step_when_all_get_the_signal(tmp_path):
    first, second = run_processes(PROGRAM, ["[0, 1]", str(tmp_path), "2"], count=2)
    assert first == second
    assert all(interrupted and steps < 80 for steps, interrupted, _ in first)
