"""Lookups inside a pipeline, where the compiler cannot divide the dim that is looked up."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.pipeline.aliases import Array
from meshwright.pipeline.divide.moving_dims import make_whole
from meshwright.program.jaxpr.equations import Equation, aval_of, bind

SCATTERS = frozenset({"scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"})


def divides_rows(eqn: Equation, spec: PartitionSpec | None) -> bool:
    """Whether an equation looks up whole rows of a table whose rows are divided over devices."""
    return spec is not None and len(spec) > 0 and spec[0] is not None and _takes_rows(eqn)


def divided_rows(
    eqn: Equation, table: Array, indices: Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec
) -> Array:
    """Look up rows of a table whose rows are divided: each device in its part, then summed."""
    axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    each = table.shape[0] // parts
    divided = NamedSharding(mesh, PartitionSpec(axes, None, *spec[1:]))
    pieces = lax.with_sharding_constraint(table.reshape(parts, each, *table.shape[1:]), divided)
    wanted = _within(eqn, indices[..., 0], table.shape[0])
    starts = jnp.arange(parts, dtype=wanted.dtype) * each
    local = wanted[None] - starts.reshape(parts, *[1] * wanted.ndim)
    mine = (local >= 0) & (local < each)
    # The compiler cannot divide lookups; the looked-up dims are whole here.
    rows = jax.vmap(lambda piece, at: jnp.take(piece, at, axis=0, mode="clip"))(pieces, local)
    mask = mine.reshape(*mine.shape, *[1] * (rows.ndim - mine.ndim))
    summed = jnp.where(mask, rows, jnp.zeros((), rows.dtype)).sum(0)
    return _filled(eqn, summed, indices[..., 0], table.shape[0])


def picks_one(eqn: Equation) -> bool:
    """Whether an equation picks elements along the last dim, one for each place in the others."""
    numbers, rank = eqn.params["dimension_numbers"], len(aval_of(eqn.invars[0]).shape)
    others = tuple(range(rank - 1))
    return (
        numbers.offset_dims == ()
        and tuple(numbers.start_index_map) == (rank - 1,)
        and tuple(numbers.operand_batching_dims) == others
        and tuple(numbers.start_indices_batching_dims) == others
    )


def picked(eqn: Equation, operand: Array, indices: Array) -> Array:
    """Pick elements along the last dim by comparing, which any division of the dim allows."""
    size = operand.shape[-1]
    at = indices[..., 0]
    wanted = _within(eqn, at, size)
    extra = wanted.ndim - (operand.ndim - 1)
    shape = (*operand.shape[:-1], *[1] * extra, size)
    here = jnp.arange(size, dtype=wanted.dtype) == wanted[..., None]
    elements = jnp.where(here, operand.reshape(shape), jnp.zeros((), operand.dtype)).sum(-1)
    return _filled(eqn, elements, at, size)


def in_whole_dims(eqn: Equation, args: list[Array], mesh: Mesh | AbstractMesh) -> list[Array]:
    """Evaluate a lookup with the dims it indexes whole on every device."""
    indexed = eqn.params["dimension_numbers"].start_index_map
    return bind(eqn, [make_whole(args[0], mesh, indexed), *args[1:]])


def _takes_rows(eqn: Equation) -> bool:
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    before = len(aval_of(eqn.invars[1]).shape) - 1
    return (
        tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"][1:]) == tuple(shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(before, before + len(shape) - 1))
    )


def _within(eqn: Equation, at: Array, size: int) -> Array:
    """Return indices clipped to valid ones; `_filled` handles the others as the mode requires."""
    at = at.astype(jnp.int32) if at.dtype.itemsize < 4 else at
    return (
        at
        if eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
        else at.clip(0, size - 1)
    )


def _filled(eqn: Equation, values: Array, at: Array, size: int) -> Array:
    """Return looked-up values, with the lookup's fill value where an index is out of bounds."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return values
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = jnp.nan if jnp.issubdtype(values.dtype, jnp.inexact) else 0
    valid = (at >= 0) & (at < size)
    mask = valid.reshape(*valid.shape, *[1] * (values.ndim - valid.ndim))
    return jnp.where(mask, values, jnp.asarray(fill, values.dtype))
