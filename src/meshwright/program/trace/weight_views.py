"""Weights seen through casts, reshapes and slices, each with the two factors of its adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.dims.shape import paired_dims
from meshwright.program.jaxpr.equations import Equation, aval_of
from meshwright.program.trace.adapters import Adapter

Dims = tuple[frozenset[int], ...]
"""For each dim of a value, the dims of the weight that it is made of."""


@dataclass(frozen=True)
class View:
    """A value that is a weight, cast or rearranged, and its adapter's factors rearranged alike.

    Attributes:
        leaf: the number of the weight.
        dims: what its dims are made of.
        adapter: the adapter of the weight; None while its uses are looked for.
        a: the factor of the inputs: the value's dims that are inputs or batch, then the rank.
        b: the factor of the outputs: the value's dims that are outputs or batch, then the rank.
    """

    leaf: int
    shape: tuple[int, ...]
    dims: Dims
    adapter: Adapter | None = None
    a: Any = None
    b: Any = None

    def sides(self) -> list[tuple[str, Any, list[int]]]:
        """Return the factors, each with the value's dims that it has."""
        if self.adapter is None:
            return []
        kinds = [self.adapter.kind(dim) for dim in self.dims]
        pairs = (("a", self.a, "input"), ("b", self.b, "output"))
        return [
            (name, array, [d for d, kind in enumerate(kinds) if kind in (own, "batch")])
            for name, array, own in pairs
        ]

    def row(self, a: Any, b: Any) -> View:
        """Return the view of one row, which a loop gets of a stack."""
        return replace(self, shape=self.shape[1:], dims=self.dims[1:], a=a, b=b)


def moved(view: View, eqn: Equation, others: Sequence[Any]) -> View | None:
    """Return the view that an equation makes of its first operand; None if it is none."""
    shape = tuple(aval_of(eqn.outvars[0]).shape)
    name = eqn.primitive.name
    if name in _SAME:
        return view
    if name == "transpose":
        return _transposed(view, tuple(eqn.params["permutation"]))
    if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        dimensions = eqn.params.get("broadcast_dimensions", ())
        plain = eqn.params.get("dimensions") is None or name == "squeeze"
        is_same = plain and sorted(dimensions) == list(dimensions)
        is_same &= math.prod(shape) == math.prod(view.shape)
        return _reshaped(view, shape) if is_same else None
    if name in ("slice", "dynamic_slice", "rev"):
        cuts = {n: _cut(eqn, others, x, dims) for n, x, dims in view.sides()}
        return replace(view, shape=shape, **cuts)
    return None


def pieces(view: View, eqn: Equation) -> list[View]:
    """Return the views that an equation makes of another by cutting it along one dim."""
    axis, stop, found = eqn.params["axis"], 0, list[View]()
    for size in eqn.params["sizes"]:
        start, stop = stop, stop + size
        cuts = {
            name: jax.lax.slice_in_dim(array, start, stop, axis=dims.index(axis))
            for name, array, dims in view.sides()
            if axis in dims
        }
        shape = tuple(size if d == axis else own for d, own in enumerate(view.shape))
        found.append(replace(view, shape=shape, **cuts))
    return found


_SAME = frozenset({"convert_element_type", "copy", "reduce_precision", "sharding_constraint"})
"""Primitives whose result is their operand, perhaps rounded or placed."""


def _cut(eqn: Equation, others: Sequence[Any], array: Any, dims: Sequence[int]) -> Any:
    """Return the part of a factor with these dims that an equation takes of the weight."""
    params, rank = eqn.params, array.shape[-1]
    if eqn.primitive.name == "rev":
        return jax.lax.rev(array, [n for n, d in enumerate(dims) if d in params["dimensions"]])
    if eqn.primitive.name == "dynamic_slice":
        starts = [*(others[d] for d in dims), jnp.zeros_like(others[0])]
        return jax.lax.dynamic_slice(
            array, starts, [*(params["slice_sizes"][d] for d in dims), rank]
        )
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    sides = (starts, 0), (limits, rank), (strides, 1)
    return jax.lax.slice(array, *([*(own[d] for d in dims), last] for own, last in sides))


def _transposed(view: View, order: tuple[int, ...]) -> View:
    def permuted(array: Any, dims: list[int]) -> Any:
        kept = [dims.index(d) for d in order if d in dims]
        return jnp.transpose(array, (*kept, len(dims)))

    return replace(
        view,
        shape=tuple(view.shape[d] for d in order),
        dims=tuple(view.dims[d] for d in order),
        **{name: permuted(array, dims) for name, array, dims in view.sides()},
    )


def _reshaped(view: View, shape: tuple[int, ...]) -> View | None:
    dims: list[frozenset[int]] = [frozenset()] * len(shape)
    for old, new in paired_dims(view.shape, shape):
        made_of = frozenset[int]().union(*(view.dims[d] for d in old if view.shape[d] != 1))
        dims = [made_of if d in new and shape[d] != 1 else known for d, known in enumerate(dims)]
    after = replace(view, shape=shape, dims=tuple(dims))
    factors: dict[str, Any] = {}
    for name, array, own in after.sides():
        target = (*(shape[d] for d in own), array.shape[-1])
        if math.prod(target) != array.size:
            return None
        factors[name] = jnp.reshape(array, target)
    return replace(after, **factors)
