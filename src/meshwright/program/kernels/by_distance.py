"""Values that depend on how far two indices are apart alone, as causal masks and windows do.

Their first row and first column have all of their numbers, so that long masks need not be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxpr.equations import (
    CALLS,
    ClosedJaxpr,
    Equation,
    aval_of,
    called_jaxpr,
)
from meshwright.program.jaxpr.walks import propagate

_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})
_SUMS = frozenset({"add", "sub"})


class _Form(NamedTuple):
    """A value that depends on a weighted sum of its indices alone.

    Attributes:
        weights: by dim; none for a number.
        linear: whether it is that sum, plus a number.
    """

    weights: tuple[int, ...] = ()
    linear: bool = True


_NUMBER = _Form()


def is_by_distance(program: ClosedJaxpr, row: int, column: int) -> bool:
    """Whether the value of a program is the same wherever the difference of two indices is."""
    if any(jnp.ndim(constant) for constant in program.consts):
        return False
    (form,) = propagate(program.jaxpr, (), _NUMBER, _forms)
    if form is None:
        return False
    others = [w for dim, w in enumerate(form.weights) if dim not in (row, column)]
    return not any(others) and (not form.weights or form.weights[row] == -form.weights[column])


def _forms(eqn: Equation, operands: list[_Form | None]) -> Sequence[_Form | None]:
    name, result = eqn.primitive.name, aval_of(eqn.outvars[0])
    unknown = [None] * len(eqn.outvars)
    if name in CALLS:
        program = called_jaxpr(eqn)
        has_arrays = any(jnp.ndim(constant) for constant in program.consts)
        return unknown if has_arrays else propagate(program.jaxpr, operands, _NUMBER, _forms)
    # Smaller integers overflow.
    is_index = jnp.issubdtype(result.dtype, jnp.signedinteger) and result.dtype.itemsize >= 4
    if name == "iota" and is_index:
        return [_Form(tuple(int(d == eqn.params["dimension"]) for d in range(result.ndim)))]
    forms = [form for form in operands if form is not None]
    if len(forms) < len(operands) or not forms:
        return unknown
    if name == "broadcast_in_dim":
        source, dims = aval_of(eqn.invars[0]).shape, eqn.params["broadcast_dimensions"]
        sizes = zip(dims, forms[0].weights, source, strict=False)
        own = {dim: weight for dim, weight, size in sizes if size == result.shape[dim]}
        weights = tuple(own.get(dim, 0) for dim in range(result.ndim))
        return [forms[0]._replace(weights=weights)]
    if name not in ELEMENTWISE or len(eqn.outvars) > 1:
        return unknown
    return [_joined(name, [f._replace(weights=f.weights or (0,) * result.ndim) for f in forms],
                    is_index=is_index)]  # fmt: skip


def _joined(name: str, forms: Sequence[_Form], *, is_index: bool) -> _Form | None:
    """Return the form of an elementwise function of values."""
    if name in _SUMS | _COMPARISONS and all(form.linear for form in forms):
        sign = 1 if name == "add" else -1
        weights = tuple(a + sign * b for a, b in zip(*(f.weights for f in forms), strict=True))
        return _Form(weights, linear=name in _SUMS and is_index)
    found = {max(f.weights, tuple(-w for w in f.weights)) for f in forms if any(f.weights)}
    if len(found) > 1:
        return None
    same = name == "convert_element_type" and is_index and forms[0].linear
    return forms[0] if same else _Form(next(iter(found), forms[0].weights), linear=False)
