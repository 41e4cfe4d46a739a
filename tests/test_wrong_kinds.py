"""Whatever is passed to a public name, what reaches the user is a `UserError`, or it works."""

import inspect
import os
import tempfile
import traceback
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.trainer import trainer as trainer_module

PACKAGE = os.path.dirname(mw.__file__)
BATCH = np.ones((8, 4), np.float32)


class Plain:
    """Neither a model nor anything else that is known."""


WRONG = {
    "None": None,
    "an integer": 7,
    "a negative number": -3,
    "zero": 0,
    "a fraction": 1.5,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "true": True,
    "a complex number": 1j,
    "a huge number": 10**30,
    "a word": "nonsense",
    "an empty text": "",
    "a text with a zero byte": "a\0b",
    "bytes": b"ab",
    "a list": [1, 2],
    "an empty list": [],
    "a tuple": (1, "a"),
    "a set": {1},
    "a dict": {"a": 1},
    "an empty dict": {},
    "a dict of numbers": {1: 2},
    "a class": Plain,
    "an instance": Plain(),
    "a function of nothing": lambda: 1,
    "a function of five": lambda a, b, c, d, e: 1,
    "objects": np.array([None, {}], dtype=object),
    "numbers": np.ones(3),
    "no such path": f"{tempfile.mkdtemp()}/no/such/path",
    "a folder that is no run": Path("folder"),
    "a file": "file",
}


def trainer(**settings):
    return mw.Trainer(
        **{
            "model": lambda rngs: nnx.Linear(4, 4, rngs=rngs),
            "loss": lambda model, batch: (model(batch) ** 2).mean(),
            "optimizer": optax.sgd(0.1),
            **settings,
        }
    )


class NotTrained:
    """Stands in for a run, once everything it is made from has been checked."""

    def __init__(self, *_, **__):
        raise mw.UserError("nothing is trained here")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, own_disk_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer_module, "TrainingRun", NotTrained)
    monkeypatch.setattr(trainer_module, "verify", NotTrained)
    Path("folder").mkdir()
    Path("folder/other").write_text("x")
    Path("file").write_text("x")


def problems(call) -> dict[str, str]:
    """Return which wrong kinds end in an exception that is not ours, and where it was raised."""
    found = {}
    for kind, value in WRONG.items():
        try:
            call(value)
        except MeshwrightError:
            continue
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
            own_code = frames[-1].filename == __file__ and len(frames) > 1 and ours
            if not own_code:
                place = f"{os.path.relpath(ours[-1].filename, PACKAGE)}:{ours[-1].lineno}"
                found[kind] = f"{type(error).__name__} at {place}: {error}"
    return found


@pytest.mark.parametrize(
    "name", [name for name in inspect.signature(mw.Trainer).parameters if name != "self"]
)
def test_arguments_of_the_trainer(name):
    assert problems(lambda value: trainer(**{name: value}).assemble(BATCH)) == {}


@pytest.mark.parametrize("name", list(inspect.signature(mw.Trainer.fit).parameters)[1:])
def test_arguments_of_fit(name):
    data = {"x": BATCH} if name == "batch_size" else [BATCH]
    given = {"data": data, "steps": None if name == "max_duration" else 1}
    one = trainer(loss=lambda model, batch: model(jax.tree.leaves(batch)[0]).mean())
    assert problems(lambda value: one.fit(**{**given, name: value})) == {}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("verify", "data"),
        ("verify", "steps"),
        ("verify", "batch_size"),
        ("assemble", "batch"),
        ("evaluate", "of"),
        ("predict", "of"),
    ],
)
def test_arguments_of_other_methods(method, name):
    given = {"data": {"x": BATCH} if name == "batch_size" else [BATCH]}
    call = getattr(trainer(), method)
    takes = inspect.signature(call).parameters
    rest = {key: value for key, value in given.items() if key in takes}
    assert problems(lambda value: call(**{**rest, name: value})) == {}


MESH = mw.build_mesh({"fsdp": 8})
PLAN = mw.Plan.from_yaml(trainer().assemble(BATCH).plan.to_yaml())
PROOF = {
    "model": lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    "loss": lambda model, batch: (model(batch) ** 2).mean(),
    "plan": PLAN,
    "batches": lambda step: 1 / 0,
}
FUNCTIONS = {
    "load_model run": mw.load_model,
    "load_model step": lambda value: mw.load_model("folder", step=value),
    "read_params path": mw.read_params,
    "export_safetensors run": lambda value: mw.export_safetensors(value, "out.safetensors"),
    "export_safetensors out": lambda value: mw.export_safetensors("folder", value),
    "build_mesh": mw.build_mesh,
    "build_mesh one size": lambda value: mw.build_mesh({"fsdp": value}),
    "build_mesh devices": lambda value: mw.build_mesh({"data": -1}, value),
    "abstract_mesh": mw.abstract_mesh,
    "abstract_mesh num_devices": lambda value: mw.abstract_mesh({"data": -1}, value),
    "visualize_mesh": mw.visualize_mesh,
    "inspect_sharding": mw.inspect_sharding,
    "simulate_devices": mw.simulate_devices,
    "ArraySource": lambda value: mw.ArraySource(x=value),
    "EarlyStopping patience": mw.EarlyStopping,
    "EarlyStopping min_delta": lambda value: mw.EarlyStopping(3, min_delta=value),
    "EarlyStopping metric": lambda value: mw.EarlyStopping(3, metric=value),
    "Plan.from_yaml": mw.Plan.from_yaml,
    "get_schedule": mw.pipeline.get_schedule,
    "get_schedule num_chunks": lambda value: mw.pipeline.get_schedule("1f1b", value),
    "Pipeline stages": lambda value: mw.pipeline.Pipeline(
        value, loss=lambda y, target: (y - target).mean(), example=BATCH
    ),
    "shard_fsdp params": lambda value: mw.shard_fsdp(value, MESH),
    "shard_fsdp mesh": lambda value: mw.shard_fsdp(BATCH, value),
    "shard_fsdp axis_name": lambda value: mw.shard_fsdp(BATCH, MESH, axis_name=value),
    "shard_fsdp min_shard_size": lambda value: mw.shard_fsdp(BATCH, MESH, min_shard_size=value),
    **{
        f"verify {name}": lambda value, name=name: mw.verify(**{**PROOF, name: value})
        for name in ("model", "loss", "plan", "steps", "optimizer", "clip_norm", "trainable")
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name):
    assert problems(FUNCTIONS[name]) == {}


@pytest.mark.parametrize(
    "config",
    [mw.CheckpointConfig, mw.PipelineConfig, mw.ShardingConfig, mw.TrackingConfig, mw.Config],
)
def test_fields_of_configs(config):
    for field in config.model_fields:
        assert problems(lambda value, field=field: config(**{field: value})) == {}
    assert problems(config.parse) == {}


def test_a_mistake_is_also_a_value_error():
    with pytest.raises(ValueError, match="the optimizer is"):
        trainer(optimizer=0.1)
    assert issubclass(mw.UserError, MeshwrightError)
