"""A run with stages, of unequal size, goes on without them, and the other way round."""

import jax
import numpy as np
import optax
import pytest
from quick import quick_module
from small_models import Residuals, square_loss, vectors

import meshwright as mw
from meshwright.config.schema import CheckpointConfig

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

ARRAYS = {name: np.asarray(array) for name, array in vectors(32, width=8).items()}


def trainer(mesh, count, **settings):
    return mw.Trainer(
        model=lambda rngs: Residuals(5, 8, rngs=rngs),
        loss=square_loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        devices=jax.devices()[:count],
        **settings,
    )


def train(trainer, folder, steps):
    # Whatever the trainer has in memory, it goes on from the folder if that has checkpoints.
    return trainer.fit(
        ARRAYS,
        steps=steps,
        batch_size=16,
        run_dir=folder,
        resume="must" if folder.exists() else "never",
        checkpoint=CheckpointConfig(every=1),
    )


@pytest.mark.full
def test_checkpoints_move_between_meshes_with_and_without_stages(tmp_path):
    pipeline = mw.PipelineConfig(schedule="interleaved", num_microbatches=2)
    staged = trainer("pipe=2", 2, pipeline=pipeline)
    alone = trainer("", 1, gradient_accumulation_steps=2)
    whole = train(alone, tmp_path / "whole", 3)
    expected = whole.assembled.canonical(whole.state)
    train(staged, tmp_path / "run", 1)
    train(alone, tmp_path / "run", 2)
    last = train(staged, tmp_path / "run", 3)
    assert last.steps == 3
    assert last.assembled.plan.schedule == "interleaved"
    found = last.assembled.canonical(last.state)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-6, err_msg=path)
