"""Indices of a batch that are out of range, found where a program looks something up with them.

Lookups do not fail on devices: they give NaN, or the last row, or a row of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.program.jaxpr.equations import (
    CALLS,
    CUSTOM_DERIVATIVES,
    REARRANGES,
    REMATS,
    ClosedJaxpr,
    Equation,
    Literal,
    aval_of,
    called_jaxpr,
    equation_module,
)
from meshwright.program.jaxpr.walks import propagate

_COPIES = REARRANGES | {"convert_element_type", "copy", "stop_gradient", "rev"}
_ENTERED = CALLS | CUSTOM_DERIVATIVES | REMATS


@dataclass(frozen=True)
class _Known:
    """Where integers come from: an array of the batch, or counting from zero.

    Attributes:
        leaf: the number of the array; None for counted numbers.
        count: how many numbers are counted.
        shifted: whether a number was added, as to indices that count from the end.
        columns: the parts of concatenated indices.
    """

    leaf: int | None = None
    count: int = 0
    shifted: bool = False
    columns: tuple[_Known | None, ...] = ()


def wrong_indices(
    closed: ClosedJaxpr, batch: Sequence[Any], names: Sequence[str], *, negative: bool
) -> list[str]:
    """Say which indices of a batch, with which a program looks something up, are out of range.

    The last inputs of the program are the arrays of the batch. With ``negative``, also name those
    below zero, which often mark what a loss masks. Positions that a table has no row for are named,
    too.
    """
    lookups: dict[tuple[int, int, str], None] = {}
    positions: dict[str, None] = {}
    inputs: list[_Known | None] = [None] * (len(closed.jaxpr.invars) - len(batch))

    def follow(eqn: Equation, operands: list[_Known | None]) -> list[_Known | None]:
        """Note the lookups of an equation; return where its results come from."""
        unknown: list[_Known | None] = [None] * len(eqn.outvars)
        if eqn.primitive.name in _ENTERED:
            inner = called_jaxpr(eqn).jaxpr
            fits = len(inner.invars) == len(operands)
            return propagate(inner, operands, None, follow) if fits else unknown
        for source, size in _lookups(eqn, operands):
            module = equation_module(eqn)
            if source is not None and source.leaf is not None:
                lookups[source.leaf, size, module] = None
            elif source is not None and source.count > size and eqn.primitive.name == "gather":
                where, last = _named(module), source.count - 1
                positions[f"{where} looks up positions 0 to {last} among {size}"] = None
        return [_result(eqn, operands)] if len(unknown) == 1 else unknown

    known = (_Known(number) for number in range(len(batch)))
    propagate(closed.jaxpr, [*inputs, *known], None, follow)
    found = [*positions]
    for leaf, size, module in lookups:
        values = np.asarray(batch[leaf])
        if values.dtype.kind not in "iu" or not values.size:
            continue
        for flat in (int(values.argmax()), int(values.argmin()))[: 1 + negative]:
            index, row = int(values.flat[flat]), flat * len(values) // values.size
            if not -size <= index < size:
                found.append(
                    f"`{names[leaf]}` has the index {index} (row {row} of the batch), and "
                    f"{_named(module)} looks it up among {size}: 0 to {size - 1}"
                )
    return found


def _named(module: str) -> str:
    return f"`{module}`" if module else "the loss"


def _lookups(eqn: Equation, operands: list[_Known | None]) -> list[tuple[_Known | None, int]]:
    """Return the indices of a lookup, each with how many there are."""
    if eqn.primitive.name == "eq":
        # A one-hot row compares a label with 0, 1, and so on.
        counts = [0 if each is None else each.count for each in operands]
        return [(own, n) for own, n in zip(operands, counts[::-1], strict=True) if n > 1]
    # What is clipped on purpose is never out of range.
    if eqn.primitive.name != "gather" or str(eqn.params["mode"]).endswith("CLIP"):
        return []
    shape, sizes, indices = aval_of(eqn.invars[0]).shape, eqn.params["slice_sizes"], operands[1]
    dims = eqn.params["dimension_numbers"].start_index_map
    columns = (indices,) if indices is None or not indices.columns else indices.columns
    limits = [shape[dim] - sizes[dim] + 1 for dim in dims]
    return list(zip(columns, limits, strict=True)) if len(columns) == len(limits) else []


def _result(eqn: Equation, operands: list[_Known | None]) -> _Known | None:
    name = eqn.primitive.name
    if name == "iota":
        return _Known(count=aval_of(eqn.outvars[0]).shape[eqn.params["dimension"]])
    if name in _COPIES:
        counts = operands[0] is not None and operands[0].count > 0
        return None if counts and name in ("slice", "dynamic_slice") else operands[0]
    if name == "add" and operands[0] is not None and isinstance(eqn.invars[1], Literal):
        return _Known(operands[0].leaf, shifted=True)
    if name == "select_n" and len(operands) == 3:
        # Indices below zero count from the end: they are raised by the size.
        case, raised = operands[1:]
        from_end = case is not None and raised == _Known(case.leaf, shifted=True)
        return case if from_end else None
    if name == "concatenate":
        last = len(aval_of(eqn.outvars[0]).shape) - 1
        if eqn.params["dimension"] == last and all(aval_of(a).shape[-1] == 1 for a in eqn.invars):
            return _Known(columns=tuple(operands))
    return None
