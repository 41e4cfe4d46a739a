"""Memory of compiled programs, against shard sizes added up by hand."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.compiled.memory import MemoryUse, memory_of
from meshwright.errors import EnvironmentProblem


def compiled(donate: bool) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    state = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=rows)
    batch = jax.ShapeDtypeStruct((64,), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(state: Any, batch: Any) -> Any:
        gathered = jax.lax.with_sharding_constraint(state, NamedSharding(mesh, PartitionSpec()))
        return state + (gathered @ gathered.T).sum() * batch, batch.sum()

    jitted = jax.jit(step, donate_argnums=0 if donate else (), out_shardings=(rows, None))
    return jitted.lower(state, batch).compile()


def test_arguments_are_the_shards_and_donation_is_not_counted_twice() -> None:
    shard = 1024 // 8 * 64 * 4
    kept, donated = memory_of(compiled(donate=False)), memory_of(compiled(donate=True))
    assert kept.argument == donated.argument == shard + 64 * 2
    assert kept.alias == 0
    assert donated.alias == shard
    assert kept.total - donated.total == pytest.approx(shard, rel=0.01)


def test_gathered_weights_are_in_the_total() -> None:
    use = memory_of(compiled(donate=True))
    assert use.temp >= 1024 * 64 * 4
    assert use.total == use.argument + use.output - use.alias + use.temp
    assert use.total >= 1024 * 64 * 4 + use.argument


def test_the_program_itself_is_reported_but_not_part_of_the_total() -> None:
    assert MemoryUse(argument=10, output=7, alias=5, temp=100).total == 112


def test_a_backend_without_figures_is_reported() -> None:
    with pytest.raises(EnvironmentProblem, match="does not report"):
        memory_of(types.SimpleNamespace(memory_analysis=lambda: None))
