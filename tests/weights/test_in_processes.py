"""Weights in several processes: the same training and the same export as in one."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hf_folders import GPT2, saved_tensors

import meshwright as mw

LIMIT_SECONDS = 300
LAUNCH = ["launch", "--nprocs=2", "--devices-per-process=2", "--"]

SCRIPT = f"""
import sys

import numpy as np
import optax

import meshwright as mw
from meshwright.distributed import setup_multinode
from meshwright.processes import is_main

setup_multinode()


def loss(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


trainer = mw.Trainer(
    model=mw.hf_model({str(GPT2)!r}, dropout=0.0), loss=loss, optimizer=optax.sgd(1e-30),
    mesh="fsdp=2,tensor=2",
)
tokens = np.arange(64).reshape(8, 8) % 320
result = trainer.fit({{"tokens": tokens}}, steps=1, batch_size=8)
exported = mw.export_hf(result, sys.argv[1])
assert (exported is None) != is_main()
"""


def run(*words):
    """Run a command in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(folder, *words, launch=()):
    return json.loads(
        run(
            *launch,
            *("train", "--json", "model=hf", f"model.weights={GPT2}", "data=synthetic"),
            *("mesh.fsdp=4", "training.steps=3", "training.global_batch_size=8", "optimizer=sgd"),
            *("training.eval_batches=1", "tracking.log_every=1", f"hydra.run.dir={folder}"),
            *words,
        )
    )


@pytest.mark.full
def test_two_processes_train_from_a_folder_and_export_like_one(tmp_path):
    alone = train(tmp_path / "one", "simulate=4")
    together = train(tmp_path / "two", launch=LAUNCH)
    assert (alone["devices"], together["devices"]) == (4, 4)
    for name in ("first_loss", "final_loss", "eval_loss"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    assert alone["final_loss"] != alone["first_loss"]
    for name in ("one", "two"):
        run("export", str(tmp_path / name), "--to", "hf", str(tmp_path / f"{name}_hf"))
    one, two = (saved_tensors(tmp_path / f"{name}_hf") for name in ("one", "two"))
    before = saved_tensors(GPT2)
    assert set(one) == set(two) == set(before)
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    assert any(not np.array_equal(two[name], before[name]) for name in before)
    assert mw.load_model(tmp_path / "two_hf").vocabulary.tokens.embedding.shape == (320, 16)


@pytest.mark.full
def test_two_processes_export_a_result_that_both_hold_a_part_of(tmp_path):
    script = tmp_path / "tune.py"
    script.write_text(SCRIPT)
    run(*LAUNCH, str(script), str(tmp_path / "out"))
    after = saved_tensors(tmp_path / "out")
    for name, array in saved_tensors(GPT2).items():
        # The learning rate is too small to change a number.
        np.testing.assert_array_equal(after[name], array, err_msg=name)
