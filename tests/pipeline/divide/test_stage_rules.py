"""Lookups done piece by piece give what JAX's own give, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshwright.mesh.build import build_mesh
from meshwright.pipeline.divide.stage_rules import divided_rows, divides_rows, picked, picks_one

TABLE = np.arange(24.0, dtype=np.float32).reshape(8, 3)
ROWS = np.array([[0, 3], [7, 4]])
SCORES = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
CHOSEN = np.array([[1, 7, 0], [2, 2, 5]])


def take_rows(table, rows):
    return table.at[rows].get(mode="fill")


def take_chosen(scores, chosen):
    return jnp.take_along_axis(scores, chosen[..., None], axis=-1)


def inner(function, *arguments):
    """Return the lookup of a function whose body may be a call."""
    closed = jax.make_jaxpr(function)(*arguments)
    eqns = list(closed.jaxpr.eqns)
    while eqns:
        eqn = eqns.pop(0)
        if eqn.primitive.name == "gather":
            return eqn
        if "jaxpr" in eqn.params:
            eqns += eqn.params["jaxpr"].jaxpr.eqns
    raise AssertionError("no lookup")


@pytest.mark.parametrize("rows", [ROWS, np.array([9, -9, 2])])
def test_rows_divided_over_devices_are_found_like_whole_ones(rows):
    spec = PartitionSpec("tensor")
    mesh = build_mesh({"tensor": 4}, jax.devices()[:4])
    eqn = inner(take_rows, TABLE, rows)
    assert divides_rows(eqn, spec)
    assert not divides_rows(eqn, PartitionSpec())
    # JAX counts negative numbers from the end before it looks up.
    at = np.where(rows < 0, rows + 8, rows)[..., None].astype(np.int32)

    @jax.jit
    def found(table):
        return divided_rows(eqn, table, at, mesh, spec)

    np.testing.assert_array_equal(found(TABLE), take_rows(jnp.asarray(TABLE), rows))
    ours = jax.grad(lambda t: jnp.nansum(found(t) ** 2))(TABLE)
    theirs = jax.grad(lambda t: jnp.nansum(take_rows(t, rows) ** 2))(jnp.asarray(TABLE))
    np.testing.assert_allclose(ours, theirs)


def test_elements_are_picked_by_comparing():
    eqn = inner(take_chosen, SCORES, CHOSEN)
    assert picks_one(eqn)
    at = CHOSEN[..., None, None].astype(np.int32)
    np.testing.assert_array_equal(picked(eqn, SCORES, at), take_chosen(SCORES, CHOSEN))
    assert not picks_one(inner(take_rows, TABLE, ROWS))
