"""Grouped convolutions train on a mesh like on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.programs import assert_close
from step.runs import by_hand, filled, on_mesh, put_together

CHANNELS = 8


class Grouped(nnx.Module):
    """A convolution in groups between two layers."""

    def __init__(self, groups):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, CHANNELS, rngs=rngs)
        self.conv = nnx.Conv(CHANNELS, CHANNELS, (3,), feature_group_count=groups, rngs=rngs)
        self.last = nnx.Linear(CHANNELS, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.conv(self.first(x))))


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.parametrize(
    ("groups", "samples", "mesh"),
    [
        (CHANNELS, 4, {"data": 2, "tensor": 2}),
        pytest.param(2, 6, {"fsdp": 2, "tensor": 4}, marks=pytest.mark.full),
        pytest.param(2, 8, {"fsdp": 2, "tensor": 4}, marks=pytest.mark.full),
    ],
    ids=["channels divided", "on every device", "samples divided"],
)
def test_kernels_of_groups_get_the_gradient_of_one_device(groups, samples, mesh):
    batch = {"x": np.random.default_rng(0).normal(size=(samples, 6, 4)).astype(np.float32)}

    def build():
        return Grouped(groups)

    with jax.enable_x64(True):
        assembled = put_together(build, loss, batch, mesh)
        found = on_mesh(assembled, filled(build), [batch, batch])
        expected = by_hand(filled(build), loss, [batch, batch])
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    assert_close(found.leaves, expected.leaves, 1e-12)
