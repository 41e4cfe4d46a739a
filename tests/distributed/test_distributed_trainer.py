"""The trainer of three configs trains what they say."""

import numpy as np
import pytest
from quick import quick_compilation

from meshwright.config.distributed_config import DistributedConfig
from meshwright.distributed import Trainer
from meshwright.errors import UserError

__all__ = ["quick_compilation"]
pytestmark = pytest.mark.quick

MODEL = {"kind": "mlp", "widths": [16, 16, 4]}
TASK = {"kind": "classification", "num_classes": 4, "input_shape": [16]}


def dataset(samples, seed):
    inputs = np.random.default_rng(seed).normal(size=(samples, 16)).astype("float32")
    return {"image": inputs, "label": inputs[:, :4].argmax(1).astype("int32")}


# docs/distributed-api.md trains one, every day.
@pytest.mark.full
def test_it_trains_and_evaluates(quick_compilation, tmp_path):
    trainer = Trainer(
        model_config=MODEL,
        training_config={"steps": 12, "global_batch_size": 16},
        distributed_config=DistributedConfig(
            world_size=8, mesh_shape=(4, 2), mesh_axis_names=("data", "model")
        ),
        run_dir=tmp_path,
        task=TASK,
        optimizer={"kind": "adam", "learning_rate": 0.05},
    )
    result = trainer.train(dataset(64, 0), dataset(32, 1))
    assert result.assembled.plan.mesh == {"data": 4, "tensor": 2}
    losses = list(result.losses.values())
    assert losses[-1] < losses[0]
    assert result.eval_loss < losses[0]
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_mapping_implies_the_task_of_its_kind():
    trainer = Trainer(model_config=MODEL, training_config={"steps": 1, "global_batch_size": 16})
    assert trainer.config.task.kind == "classification"
    own = Trainer(model_config={"kind": "gpt"}, training_config={"steps": 1})
    assert own.config.task.kind == "language_modeling"


def test_a_key_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="micro_batch_size"):
        Trainer(model_config="gpt2_tiny", training_config={"micro_batchsize": 4})
    with pytest.raises(UserError, match="a config is of type int"):
        Trainer(model_config=3, training_config={})
