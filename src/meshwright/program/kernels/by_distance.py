"""Values that depend on how far two indices are apart alone, as causal masks and windows do.

Their first row and first column have all of their numbers, so that long masks need not be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxpr.equations import CALLS, ClosedJaxpr, Equation, aval_of, called_jaxpr
from meshwright.program.jaxpr.walks import propagate

_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})


class _Form(NamedTuple):
    """A value that depends on a weighted sum of its indices alone.

    Attributes:
        weights: by dim; none for a number.
        linear: whether it is that sum, plus a number.
    """

    weights: Mapping[int, int]
    linear: bool = True


def is_by_distance(program: ClosedJaxpr, row: int, column: int) -> bool:
    """Whether the value of a program is the same wherever the difference of two indices is."""
    (form,) = _results(program, ())
    if form is None or not form.weights.keys() <= {row, column}:
        return False
    return sum(form.weights.values()) == 0


def _results(program: ClosedJaxpr, operands: Sequence[_Form | None]) -> Sequence[_Form | None]:
    if any(jnp.ndim(constant) for constant in program.consts):
        return [None] * len(program.jaxpr.outvars)
    return propagate(program.jaxpr, operands, _Form({}), _forms)


def _forms(eqn: Equation, operands: Sequence[_Form | None]) -> Sequence[_Form | None]:
    name, result, known = eqn.primitive.name, aval_of(eqn.outvars[0]), [f for f in operands if f]
    # Smaller integers overflow.
    is_index = jnp.issubdtype(result.dtype, jnp.signedinteger) and result.dtype.itemsize >= 4
    if name in CALLS:
        return _results(called_jaxpr(eqn), operands)
    if name == "iota" and is_index:
        return [_Form({eqn.params["dimension"]: 1})]
    if name == "broadcast_in_dim" and known:
        to, source = eqn.params["broadcast_dimensions"], aval_of(eqn.invars[0]).shape
        weights = {to[d]: w for d, w in known[0].weights.items() if source[d] > 1}
        return [known[0]._replace(weights=weights)]
    if name in ELEMENTWISE and len(known) == len(operands) and len(eqn.outvars) == 1:
        return [_joined(name, known, is_index=is_index)]
    return [None] * len(eqn.outvars)


def _joined(name: str, forms: Sequence[_Form], *, is_index: bool) -> _Form | None:
    """Return the form of an elementwise function of values."""
    first, *others = forms
    if name in {"add", "sub", *_COMPARISONS} and all(form.linear for form in forms):
        sign, (other,) = 1 if name == "add" else -1, others
        dims = {**first.weights, **other.weights}
        sums = {d: first.weights.get(d, 0) + sign * other.weights.get(d, 0) for d in dims}
        weights = {d: weight for d, weight in sums.items() if weight}
        return _Form(weights, is_index and name not in _COMPARISONS)
    found = [form.weights for form in forms if form.weights]
    if any(each != found[0] for each in found):
        return None
    same = name == "convert_element_type" and is_index and first.linear
    return _Form(found[0] if found else {}, same)
