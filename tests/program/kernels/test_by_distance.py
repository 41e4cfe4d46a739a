"""Masks that depend on distance alone: found, and nothing else taken for one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.program.kernels.masks import is_by_distance

pytestmark = pytest.mark.quick
TABLE = np.arange(36).reshape(6, 6) % 5


def at():
    return jnp.arange(6)


FORMS = {
    "causal": lambda: jnp.tril(jnp.ones((6, 6), bool)),
    "added": lambda: jnp.triu(jnp.full((6, 6), -1e9), 1),
    "window": lambda: (at()[:, None] - at() >= 0) & (at()[:, None] < at() + 3),
    "flax": lambda: nnx.make_causal_mask(jnp.ones((1, 6))),
    "either side": lambda: abs(at()[:, None] - at()) < 3,
    "everything": lambda: jnp.ones((6, 6), bool),
    "sum": lambda: at()[:, None] + at() < 6,
    "prefix": lambda: jnp.tril(jnp.ones((6, 6), bool)) | (at() < 3),
    "chunks": lambda: at()[:, None] // 2 == at() // 2,
    "overflow": lambda: (at()[:, None] + 125).astype("int8") > (at() + 123).astype("int8"),
    "table": lambda: jnp.asarray(TABLE) > 2,
    "rounded": lambda: at()[:, None] * 0.3 >= at() * 0.3,
    "one side": lambda: jnp.broadcast_to(at() < 3, (6, 6)),
}
BY_DISTANCE = {"causal", "added", "window", "flax", "either side", "everything"}


@pytest.mark.parametrize("name", FORMS)
def test_only_values_that_are_constant_along_diagonals_count(name):
    program = jax.make_jaxpr(FORMS[name])()
    rank = program.out_avals[0].ndim
    assert is_by_distance(program, rank - 2, rank - 1) == (name in BY_DISTANCE)
    if name in BY_DISTANCE:
        value = np.asarray(FORMS[name]()).reshape(6, 6)
        assert all(len(set(np.diagonal(value, d).tolist())) == 1 for d in range(-5, 6))
