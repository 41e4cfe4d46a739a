"""Permutes that some devices may not reach are found, and no others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from meshwright.compiled.divergence import divergent_permutes
from meshwright.program.jaxpr.names import module_of

pytestmark = pytest.mark.quick

SIZES = {"pipe": 2, "fsdp": 2}


def moved(x, axis):
    return lax.ppermute(x, axis, [(0, 1), (1, 0)])


def in_a_branch(x, axis):
    with jax.named_scope("~model.norm"):
        return lax.cond(lax.axis_index("pipe") == 0, lambda: moved(x, axis), lambda: x)


def in_a_loop_of_unknown_length(x, axis):
    def turn(carry):
        return carry[0] + 1, moved(carry[1], axis)

    return lax.while_loop(lambda carry: carry[0] < lax.axis_index("pipe"), turn, (0, x))[1]


def in_a_known_loop(x, axis):
    return lax.fori_loop(0, 3, lambda _, x: moved(x, axis), x)


def found(function, axis):
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(None, "fsdp")
    mapped = jax.shard_map(
        lambda x: function(x, axis), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones((4, 4))).compile().as_text()
    assert "collective-permute" in text
    return divergent_permutes(text, SIZES, "pipe")


@pytest.mark.parametrize("function", [in_a_branch, in_a_loop_of_unknown_length])
def test_a_permute_that_some_devices_may_not_reach_is_found(function):
    (op_name,) = found(function, "fsdp")
    assert op_name.endswith("/ppermute")
    assert found(function, "pipe") == []


def test_its_module_is_named():
    (op_name,) = found(in_a_branch, "fsdp")
    assert module_of(op_name) == "model.norm"


@pytest.mark.parametrize("function", [moved, in_a_known_loop])
def test_a_permute_that_all_devices_reach_is_not(function):
    assert found(function, "fsdp") == []
