"""Weights in sharded arrays: the same on every mesh, each slice read alone."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hf_folders import HF, expected
from quick import quick_module

import meshwright as mw
from meshwright.program.trace import build_model
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.load import load_state, weights_of
from meshwright.weights.safetensors_format import Tensor

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

MESHES = {
    "fsdp=4,tensor=2": mw.ShardingConfig(min_shard_size=0),
    "pipe=2,data=4": mw.ShardingConfig(blocks="scan"),
}


def square_loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def assemble(name, mesh, **settings):
    trainer = mw.Trainer(
        model=mw.hf_model(HF / name),
        loss=square_loss,
        optimizer=optax.adamw(1e-3),
        mesh=mesh,
        sharding=MESHES[mesh],
        **settings,
    )
    inputs, _ = expected(name)
    return trainer.assemble({"x": np.tile(inputs, (4, *[1] * (inputs.ndim - 1)))})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("gpt2", "fsdp=4,tensor=2", marks=pytest.mark.full),
        pytest.param("gpt2", "pipe=2,data=4", marks=pytest.mark.full),
        pytest.param("gemma3", "fsdp=4,tensor=2", marks=pytest.mark.full),
        pytest.param("gemma3_multimodal", "pipe=2,data=4", marks=pytest.mark.full),
        pytest.param("llama", "fsdp=4,tensor=2", marks=pytest.mark.full),
        # Three blocks on two stages: the shorter stage is padded.
        pytest.param("llama", "pipe=2,data=4", marks=pytest.mark.full),
        pytest.param("phi3", "fsdp=4,tensor=2", marks=pytest.mark.full),
        pytest.param("qwen2", "fsdp=4,tensor=2", marks=pytest.mark.full),
        pytest.param("qwen3", "fsdp=4,tensor=2", marks=pytest.mark.full),
        pytest.param("vit", "fsdp=4,tensor=2", marks=pytest.mark.full),
    ],
)
def test_every_mesh_gets_the_same_parameters_where_the_step_has_them(name, mesh):
    assembled = assemble(name, mesh)
    weights = weights_of(open_folder(HF / name), assembled)
    state = load_state(weights, assembled, seed=3)
    parameters = assembled.canonical_params(state.params)
    assert set(parameters) == set(weights.shapes)
    for path, array in parameters.items():
        whole = weights.read_whole(path, np.float32)
        np.testing.assert_array_equal(np.asarray(array), whole, err_msg=path)
    usual = assembled.init(3)
    for ours, like in zip(jax.tree.leaves(state), jax.tree.leaves(usual), strict=True):
        assert (ours.shape, ours.dtype) == (like.shape, like.dtype)
        assert ours.sharding.is_equivalent_to(like.sharding, ours.ndim)
    keys = zip(state.model_state, usual.model_state, strict=True)
    assert all((jax.random.key_data(a) == jax.random.key_data(b)).all() for a, b in _keys(keys))


def _keys(pairs):
    return [(a, b) for a, b in pairs if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)]


def test_no_slice_is_larger_than_a_device_holds_and_nothing_random_is_computed(monkeypatch):
    assembled = assemble("llama", "fsdp=4,tensor=2")
    read = []
    whole = Tensor.read
    monkeypatch.setattr(
        Tensor, "read", lambda self, region: read.append((self, region)) or whole(self, region)
    )
    monkeypatch.setattr(build_model, "_build", None)
    load_state(weights_of(open_folder(HF / "llama"), assembled), assembled, seed=0)
    sharded = [(tensor, region) for tensor, region in read if len(tensor.shape) == 2]
    assert len(sharded) >= 8 * 7 * 3
    for tensor, region in sharded:
        assert 8 * np.prod([stop - start for start, stop in region]) == np.prod(tensor.shape)


@pytest.mark.full
def test_loading_holds_little_more_than_the_shards():
    program = Path(__file__).parent / "loaded_in_a_process.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held, slice_bytes, extra = map(int, re.findall(r"\d+", done.stdout))
    assert held > 190 * 2**20
    # Python and JAX allocate a few MB of their own meanwhile.
    assert extra <= 2 * slice_bytes + 24 * 2**20
