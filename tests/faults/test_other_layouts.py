"""Rows 20 and 21: data that end early in one process, and runs that go on in more or fewer."""

import os
import subprocess
import sys

import numpy as np
import pytest
from faults.harness import (
    LIMIT_SECONDS,
    OWN,
    RUN,
    TRAINING,
    checkpoints,
    events,
    launch,
    metrics,
    start,
)

pytestmark = [pytest.mark.full, pytest.mark.faults]


ENDS = """
import os
from meshwright.distributed import setup_multinode
setup_multinode()
import optax
import meshwright as mw
from meshwright.data.protocols import OutOfData
from own import Net, RANK, data, loss

class Ends:
    def batch(self, step, batch_size):
        if step >= (6 if RANK == 1 else 100):
            raise OutOfData
        return data(step, batch_size)

trainer = mw.Trainer(model=lambda rngs: Net(rngs=rngs), loss=loss, optimizer=optax.adamw(0.01),
                     mesh="fsdp=2", log_every=1)
result = trainer.fit(Ends(), batch_size=12, steps=20, run_dir="run")
print(result.steps, result.stopped)
"""


def test_one_process_that_runs_out_of_data_ends_all_of_them(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "ends.py").write_text(ENDS)
    done = start(tmp_path, "--nprocs=2", "ends.py").finish()
    assert done.code == 0, done.err
    said = "6 the batches ran out after 6 of 20 steps"
    assert done.out.splitlines()[-1] == said
    assert f"[1] {said}" in done.err.splitlines()
    (stop,) = [event for event in events(done.run) if event["kind"] == "stop"]
    assert stop["step"] == 6
    assert max(checkpoints(done.run)) == 6
    assert list(metrics(done.run)) == [1, 2, 3, 4, 5, 6]


def test_a_function_that_ends_in_one_process_ends_all_of_them(tmp_path):
    own = """
    plain = data

    def data(step, batch_size):
        if RANK == 1 and step >= 6:
            raise StopIteration
        return plain(step, batch_size)
    """
    done = launch(tmp_path, own=own, steps=20).finish()
    assert done.code == 0, done.err
    assert "process 1 has no batch after step 6: all processes stop there" in done.err
    assert list(metrics(done.run)) == [1, 2, 3, 4, 5, 6]
    assert max(checkpoints(done.run)) == 6


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "is None"),
        ("plain(step, batch_size - 1)", "has 11 samples"),
        ("{'x': plain(step, batch_size)['x']}", "differs from the batches before it"),
    ],
)
def test_what_is_no_batch_in_one_process_is_an_error_that_names_the_call(
    tmp_path, returned, said, rank
):
    own = f"""
    plain = data

    def data(step, batch_size):
        return {returned} if RANK == {rank} and step == 6 else plain(step, batch_size)
    """
    done = launch(tmp_path, own=own, steps=20).finish()
    assert done.code == 2, done.err
    assert f"[{rank}] error: batch 6 (own:data(step=6)) {said}" in done.first_error


def test_a_run_goes_on_in_2_then_4_then_1_processes(tmp_path, undisturbed):
    reference = undisturbed(2, 12).metrics
    for nprocs, steps in ((2, 4), (4, 8)):
        done = launch(tmp_path, nprocs=nprocs, steps=steps).finish()
        assert done.code == 0, done.err
    assert "continuing after step 4" in done.err
    alone = subprocess.run(
        [
            *(sys.executable, "-m", "meshwright", "train", *TRAINING, "training.steps=12"),
            *("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=2", "simulate=2"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert alone.returncode == 0, alone.stderr
    assert "continuing after step 8" in alone.stderr
    found = metrics(tmp_path / RUN)
    assert list(found) == list(reference) == list(range(1, 13))
    for step, expected in reference.items():
        for name in ("samples", "squares"):
            assert found[step][name] == expected[name]
        # Sums in another order differ by their rounding.
        np.testing.assert_allclose(found[step]["loss"], expected["loss"], rtol=1e-5)
    for step in range(1, 5):
        assert found[step] == reference[step]
