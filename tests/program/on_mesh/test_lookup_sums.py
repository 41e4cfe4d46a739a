"""Gradients of lookups in divided rows: the numbers of one device, each sent once over an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from program.kernels.kernel_runs import assembled, assert_equal, differentiate
from program.on_mesh.test_context import SIZES, TASK, llama, tokens, written

import meshwright as mw
from meshwright.ledgers.make_ledger import make_ledger
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.on_mesh.lookup_sums import LookupSums


@pytest.mark.parametrize("length", [8, 7])
def test_gradients_are_those_of_one_device(length):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "context"), axis_types=(AxisType.Auto,) * 3)
    rows, sharded = PartitionSpec(("data", "fsdp"), "context"), PartitionSpec(None, "fsdp")
    random = np.random.default_rng(0)

    def gradient(operands, cotangent):
        table, indices = operands
        return jnp.zeros_like(table).at[indices].add(cotangent)

    with jax.enable_x64(True):
        indices, cotangent = (
            random.integers(6, size=(4, length)),
            random.normal(size=(4, length, 4)),
        )
        place = NamedSharding(mesh, rows if length == 8 else PartitionSpec(rows[0]))
        sums = LookupSums(rows, sharded, MeshView(mesh))
        table = jnp.zeros((6, 4))
        operands = jax.device_put((indices, cotangent), place)
        found = jax.jit(lambda at, own: sums(gradient, (table, at), own))(*operands)
        np.testing.assert_allclose(found, gradient((table, indices), cotangent), rtol=1e-12)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, sharded), 2)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,context=4", "data=2,fsdp=2,context=2"])
@pytest.mark.parametrize(
    "build", [llama(1, **SIZES), llama(1, **{**SIZES, "tied_embeddings": True}), written(window=5)]
)
def test_programs_sum_them_over_shards(build, mesh):
    batch, sharding = tokens(8, 64), mw.ShardingConfig(min_shard_size=0)
    options = {"wide": False, "sharding": sharding}
    alone = differentiate(build, TASK.loss, batch, "none", mesh="data=1", **options)
    found = differentiate(build, TASK.loss, batch, "xla", mesh=mesh, **options)
    assert_equal(found, alone, 1e-5, under="tokens")
    axes = make_ledger(assembled(build, TASK.loss, batch, "xla", mesh=mesh, **options), batch).axes
    # Tied embeddings are scattered over fsdp once for each of their reads.
    assert all(axis.ratio < 1.05 for name, axis in axes.items() if name != "fsdp")
    assert "reduce" not in axes["context"].modules["tokens"].kinds
