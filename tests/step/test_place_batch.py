"""Microbatches take every n-th sample, and no sample leaves its device."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.compiled.collectives import read_collectives
from meshwright.mesh.build import build_mesh
from meshwright.step.place_batch import split_strided

pytestmark = pytest.mark.quick

MESHES = [({"data": 8}, "data"), ({"data": 2, "fsdp": 4}, ("data", "fsdp")), ({"tensor": 8}, None)]


@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_microbatches_are_strided_and_stay_where_they_are(sizes, axes):
    mesh, spec = build_mesh(sizes), PartitionSpec(*([axes] if axes else []))
    batch = [np.arange(64 * 3).reshape(64, 3).astype(np.float32), np.arange(64)]
    compiled = (
        jax.jit(
            lambda arrays: split_strided(arrays, 4, mesh, spec),
            in_shardings=NamedSharding(mesh, spec),
            out_shardings=NamedSharding(mesh, PartitionSpec(None, *spec)),
        )
        .lower(batch)
        .compile()
    )
    assert read_collectives(compiled.as_text(), dict(mesh.shape)) == []
    split = compiled([jax.device_put(x, NamedSharding(mesh, spec)) for x in batch])
    for whole, parts in zip(batch, split, strict=True):
        for number in range(4):
            np.testing.assert_array_equal(parts[number], whole[number::4])


def test_contiguous_microbatches_would_move_samples():
    mesh, spec = build_mesh({"data": 8}), PartitionSpec("data")
    compiled = (
        jax.jit(
            lambda x: x.reshape(4, 16, 3),
            in_shardings=NamedSharding(mesh, spec),
            out_shardings=NamedSharding(mesh, PartitionSpec(None, "data")),
        )
        .lower(np.zeros((64, 3), np.float32))
        .compile()
    )
    assert read_collectives(compiled.as_text(), dict(mesh.shape))
