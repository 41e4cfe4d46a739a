"""Rings: where attention looks back by a window alone, the cache holds no more positions than it.

Keys, scores, their weights and values have a dim of keys. If all positions before some window are
masked wherever those are summed over, the last positions are enough: p is at p modulo the window.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from meshwright.generation.row_plan import RowPlan
from meshwright.program.jaxpr.equations import Equation, Var

Ring = tuple[int, int]
"""A dim of keys, and how many of the last positions it has."""
_SUMS = ("reduce_sum", "reduce_max", "dot_general")


class _Keys:
    """Dims of keys that must have the same positions, and the windows in which they are summed."""

    def __init__(self, variable: Var, dim: int) -> None:
        self.dims, self.windows = {variable: dim}, list[int]()


class _Rings:
    def __init__(self, plan: RowPlan) -> None:
        self.plan, self.positions = plan, plan.positions
        self.found: dict[Any, _Keys] = {v: _Keys(v, dim) for v, dim in plan.kept.items()}

    def follow(self, eqn: Equation, number: int, row: int) -> None:
        """Follow the keys that rows of a result, or all of it, are computed from."""
        variable, rule = eqn.outvars[number], None
        if row >= 0:
            rule = self.positions.rule(eqn, number, row)
        # In the dim of rows, an operation reads the same rows, not all keys.
        dims = {
            n: self.found[atom].dims[atom]
            for n, atom in enumerate(eqn.invars)
            if isinstance(atom, Var) and atom in self.found
        }
        dims = {n: dim for n, dim in dims.items() if rule is None or rule.dims[n] != dim}
        for n, dim in dims.items():
            after = self._dim_after(eqn, number, row, n, dim)
            other = variable if after is not None else eqn.invars[min(dims)]
            keys = self._join(
                self.found.setdefault(other, _Keys(variable, after or 0)), self.found[eqn.invars[n]]
            )
            if after is None:
                known = eqn.primitive.name in _SUMS and len(dims) == len(eqn.invars)
                pairs = [(eqn.invars[i], d) for i, d in dims.items()]
                keys.windows.append(max(self.plan.windows.get(p, 0) for p in pairs) * known)
            elif keys.dims[variable] != after:
                keys.windows.append(0)

    def _dim_after(
        self, eqn: Equation, result: int, row: int, operand: int, dim: int
    ) -> int | None:
        """Return which dim of a result is a dim of an operand; None if it is summed over."""
        for other in self.positions.of(eqn.outvars[result]):
            rule = self.positions.rule(eqn, result, other) if other != row else None
            if rule is not None and not rule.whole and rule.dims[operand] == dim:
                return other
        return None

    def _join(self, one: _Keys, other: _Keys) -> _Keys:
        if one is not other:
            one.dims |= other.dims
            one.windows += other.windows
            self.found.update(dict.fromkeys(other.dims, one))
        return one


def find_rings(plan: RowPlan) -> dict[Var, Ring]:
    """Return, by variable that has keys of the last positions alone, their dim and number."""
    rings = _Rings(plan)
    for eqn in plan.positions.jaxpr.eqns if any(plan.windows.values()) else ():
        for number, variable in enumerate(eqn.outvars):
            for row, _ in plan.needs.get(variable, ()):
                if row >= 0 or variable not in plan.kept:
                    rings.follow(eqn, number, row)
    found = {v: (k.dims[v], k.windows) for v, k in rings.found.items()}
    return {v: (dim, max(w)) for v, (dim, w) in found.items() if w and min(w) > 0}


def positions_in(size: int, last: Any) -> Array:
    """Return which position each place of a ring has, if the last one is given.

    Places that have none yet stand for later positions, which are masked.
    """
    before = last - (last - jnp.arange(size)) % size
    return jnp.where(before < 0, before + size, before)
