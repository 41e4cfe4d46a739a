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


def train(folder, steps, mesh, count, **settings):
    trainer = mw.Trainer(
        model=lambda rngs: Residuals(5, 8, rngs=rngs),
        loss=square_loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        devices=jax.devices()[:count],
        **settings,
    )
    return trainer.fit(
        ARRAYS, steps=steps, batch_size=16, run_dir=folder, checkpoint=CheckpointConfig(every=1)
    )


def staged(folder, steps):
    pipeline = mw.PipelineConfig(schedule="interleaved", num_microbatches=4)
    return train(folder, steps, "pipe=2,data=2", 4, pipeline=pipeline)


def alone(folder, steps):
    return train(folder, steps, "", 1, gradient_accumulation_steps=4)


def test_checkpoints_move_between_meshes_with_and_without_stages(tmp_path):
    whole = alone(tmp_path / "whole", 3)
    staged(tmp_path / "run", 1)
    alone(tmp_path / "run", 2)
    last = staged(tmp_path / "run", 3)
    assert last.updates == 3
    assert last.assembled.plan.schedule == "interleaved"
    expected = whole.assembled.canonical(whole.state)
    found = last.assembled.canonical(last.state)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-6, err_msg=path)
