"""Rings: where attention looks back by a window alone, the cache holds no more positions than it.

Keys, scores, their weights and values have a dim of keys. If all positions before some window are
masked wherever those are summed over, the last positions are enough: p is at p modulo the window.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from meshwright.generation.positions import Positions
from meshwright.generation.row_plan import RowPlan
from meshwright.program.jaxpr.equations import Equation, Var

Ring = tuple[int, int]
"""A dim of keys, and how many of the last positions it has."""
_SUMS = ("reduce_sum", "reduce_max", "dot_general")


class _Keys(NamedTuple):
    """Dims of keys that must have the same positions, and the windows in which they are summed."""

    dims: dict[Var, int]
    windows: list[int]


def find_rings(plan: RowPlan) -> dict[Var, Ring]:
    """Return, by variable that has keys of the last positions alone, their dim and number."""
    found: dict[Any, _Keys] = {v: _Keys({v: dim}, []) for v, dim in plan.kept.items()}
    for eqn in plan.positions.jaxpr.eqns if any(plan.windows.values()) else ():
        for number, variable in enumerate(eqn.outvars):
            for row, _ in plan.needs.get(variable, ()):
                if row >= 0 or variable not in plan.kept:
                    _follow(plan, found, eqn, number, row)
    whole = [(v, keys) for v, keys in found.items() if keys.windows and min(keys.windows) > 0]
    return {v: (keys.dims[v], max(keys.windows)) for v, keys in whole}


def _follow(plan: RowPlan, found: dict[Any, _Keys], eqn: Equation, number: int, row: int) -> None:
    """Follow the keys that rows of a result, or all of it, are computed from."""
    variable = eqn.outvars[number]
    rule = plan.positions.rule(eqn, number, row) if row >= 0 else None
    read = [(n, a) for n, a in enumerate(eqn.invars) if isinstance(a, Var) and a in found]
    dims = {n: found[atom].dims[atom] for n, atom in read}
    # In the dim of rows, an operation reads the same rows, not all keys.
    dims = {n: dim for n, dim in dims.items() if rule is None or rule.dims[n] != dim}
    summed = [plan.windows.get((atom, dims[n]), 0) for n, atom in read if n in dims]
    known = eqn.primitive.name in _SUMS and len(dims) == len(eqn.invars)
    for n, dim in dims.items():
        after = _dim_after(plan.positions, eqn, number, row, n, dim)
        first = eqn.invars[min(dims)] if after is None else variable
        keys, other = found.setdefault(first, _Keys({variable: after or 0}, [])), eqn.invars[n]
        if keys is not (joined := found[other]):
            keys.dims.update(joined.dims)
            keys.windows.extend(joined.windows)
            found.update(dict.fromkeys(joined.dims, keys))
        if after is None:
            keys.windows.append(max(summed) if known else 0)
        elif keys.dims[variable] != after:
            keys.windows.append(0)


def _dim_after(
    positions: Positions, eqn: Equation, result: int, row: int, operand: int, dim: int
) -> int | None:
    """Return which dim of a result is a dim of an operand; None if it is summed over."""
    others = [other for other in positions.of(eqn.outvars[result]) if other != row]
    rules = [(other, positions.rule(eqn, result, other)) for other in others]
    return next((o for o, r in rules if r and not r.whole and r.dims[operand] == dim), None)


def positions_in(size: int, last: Any) -> Array:
    """Return the position at each place of a ring: a later one, which is masked, if none yet."""
    before = last - (last - jnp.arange(size)) % size
    return jnp.where(before < 0, before + size, before)
