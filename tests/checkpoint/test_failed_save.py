"""Saves that fail: one message with the numbers, nothing left behind, and the process ends."""

import re
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from meshwright.checkpoint import CheckpointMetadata, CheckpointStore

FULL_DISK = """
import resource, sys
import meshwright as mw
mw.simulate_devices(2)
import numpy as np, optax
from flax import nnx

class Full(mw.Callback):
    def on_checkpoint(self, step):
        if step == 4:
            # No file may become larger than this, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

class Gone(mw.Callback):
    def on_checkpoint(self, step):
        if step == 4:
            folder = Path(sys.argv[1]) / "checkpoints"
            folder.rename(folder.with_name("moved"))
            folder.write_text("")

from pathlib import Path
from meshwright.errors import EnvironmentProblem
trainer = mw.Trainer(
    model=lambda rngs: nnx.Linear(64, 1024, rngs=rngs),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    optimizer=optax.adam(0.01), mesh="fsdp=2", log_every=1,
)
x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
try:
    trainer.fit(
        [{"x": x}] * 8, steps=8, run_dir=sys.argv[1], callbacks=[globals()[sys.argv[2]]()],
        checkpoint=mw.CheckpointConfig(every=2),
    )
except EnvironmentProblem as error:
    print(error)
    sys.exit(error.exit_code)
"""


# tests/trainer/test_loop.py has a run that a failed save ends, every day.
@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        # For a moment there is neither the folder nor the file in its place.
        ("Gone", "Not a directory|No such file or directory"),
        ("Full", "File too large"),
    ],
)
def test_a_save_that_fails_ends_the_run_at_once(tmp_path, how, reason):
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert time.monotonic() - started < 60
    assert done.returncode == 1
    assert done.stdout, done.stderr
    what, why, fix = done.stdout.splitlines()
    # The callback is called while step 4 is being written.
    assert re.fullmatch("the state after [46] steps could not be saved", what)
    assert re.search(reason, why)
    # Parameters and two moments of Adam: 3 × (64 + 1) × 1024 × 4 bytes, and the counters.
    assert "a checkpoint takes up to 798.7 kB, and " in why
    assert "are free in" in why
    assert "resume from the previous checkpoint" in fix
    assert "Traceback" not in done.stderr
    assert "could not be saved: " not in done.stderr
    folder = tmp_path / ("checkpoints" if how == "Full" else "moved")
    names = {path.name for path in folder.iterdir()}
    unfinished = "4.orbax-checkpoint-tmp"
    if how == "Gone" and unfinished in names:
        # The folder was taken away while step 4 was being written, out of reach of the run.
        assert what == "the state after 4 steps could not be saved"
        assert "4" not in names
        names.remove(unfinished)
    assert "2" in names
    assert names <= {"2", "4"}


@pytest.mark.parametrize("moved", ["checkpoints", pytest.param(".", marks=pytest.mark.full)])
def test_a_folder_that_is_moved_away_is_not_made_anew_and_not_called_full(tmp_path, moved):
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    state = {"params": {"x": jnp.arange(8.0)}}
    assert store.save(state, CheckpointMetadata(step=1, seed=0, global_batch_size=8)) is None
    assert store.wait().error is None
    (run / moved).rename(tmp_path / "elsewhere")
    store.save(state, CheckpointMetadata(step=2, seed=0, global_batch_size=8))
    failed = store.close()
    assert "checkpoints is not there any more: it was moved or deleted" in failed.reason
    assert failed.fix == "move it back, or choose another run_dir"
    assert not (run / "checkpoints").exists()
