"""Rules for rows: what an operation needs of its operands to compute some rows of its result.

A row is what belongs to one position: the index of a value along the dim of positions. Most
operations compute a row from the same row of their operands; some (convolutions over time, running
sums, shifts) need whole operands, and the row is taken from the whole result. Of values with two
dims of positions, `hidden_after` says which pairs are still masked after an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.op import primitives, result_dims
from meshwright.program.jaxpr.equations import Equation, Value, aval_of, bind, scan_counts

_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
)
_RUNNING = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


@dataclass(frozen=True)
class Rows:
    """So many rows from a first position on, a number of the program that may be traced."""

    start: Any
    count: int

    def of(self, value: Value, dim: int) -> Value:
        """Return these rows of a value that has all of them."""
        return jax.lax.dynamic_slice_in_dim(value, self.start, self.count, dim)

    def chunks(self, size: int) -> Rows:
        """Return them in chunks of so many; one row belongs to one chunk."""
        return self if size == 1 else Rows(self.start // size, max(1, self.count // size))


Run = Callable[[Equation, Sequence[Value], Rows], list[Value]]


@dataclass(frozen=True)
class RowRule:
    """How rows of a result are computed.

    Attributes:
        dims: for each operand, the dim of which the same rows are needed; None for all of it.
        run: computes the result from the operands and the rows.
        whole: whether all operands are needed whole, and the rows are taken from the result.
        chunked: whether whole chunks are needed, because it divides rows into them or joins them.
    """

    dims: tuple[int | None, ...]
    run: Run
    whole: bool = False
    chunked: bool = False


Rule = Callable[[Equation, int, int], RowRule | None]
"""From an operation, the number of a result and its dim of positions."""


def row_rule(eqn: Equation, result: int, dim: int, chunk: int = 1) -> RowRule | None:
    """Return how rows along a dim of one result are computed; None if there is no way.

    Rows are computed in chunks of so many, and a dim may count chunks.
    """
    name = eqn.primitive.name
    if name == "reshape" and chunk > 1 and (found := _rechunked(eqn, dim, chunk)):
        return found
    if name in ELEMENTWISE:
        size = _out(eqn, result)[dim]
        shapes = [aval_of(a).shape for a in eqn.invars]
        # Scalars and dims of size 1 are broadcast.
        return RowRule(tuple(dim if s and s[dim] == size else None for s in shapes), _bound)
    rule = _RULES.get(name)
    return None if rule is None else rule(eqn, result, dim)


def is_time_scan(eqn: Equation) -> bool:
    """Whether an equation is a loop; its sequences and stacked results have one row a turn."""
    return eqn.primitive.name == "scan" and not eqn.params.get("reverse", False)


def _bound(eqn: Equation, operands: Sequence[Value], rows: Rows) -> list[Value]:
    del rows
    return bind(eqn, operands)


def _out(eqn: Equation, result: int = 0) -> tuple[int, ...]:
    return aval_of(eqn.outvars[result]).shape


def _in(eqn: Equation, operand: int = 0) -> tuple[int, ...]:
    return aval_of(eqn.invars[operand]).shape


def _resized(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return (*shape[:dim], count, *shape[dim + 1 :])


def _resizing(param: str, dim: int) -> Run:
    """Run an operation with as many rows as there are, where a parameter says how many."""

    def run(eqn: Equation, operands: Sequence[Value], rows: Rows) -> list[Value]:
        sizes = _resized(eqn.params[param], dim, rows.count)
        return bind(eqn.replace(params={**eqn.params, param: sizes}), operands)

    return run


def _whole(eqn: Equation) -> RowRule:
    return RowRule((None,) * len(eqn.invars), _bound, whole=True)


def _broadcast(eqn: Equation, result: int, dim: int) -> RowRule | None:
    placed = tuple(eqn.params["broadcast_dimensions"])
    inner = placed.index(dim) if dim in placed else None
    if inner is not None and _in(eqn)[inner] == 1 and _out(eqn)[dim] != 1:
        inner = None
    return RowRule((inner,), _resizing("shape", dim))


def _reshape(eqn: Equation, result: int, dim: int) -> RowRule | None:
    shape, out = _in(eqn), _out(eqn)
    before = math.prod(out[:dim])
    inner = [
        i for i, size in enumerate(shape) if size == out[dim] and math.prod(shape[:i]) == before
    ]
    if not inner or eqn.params.get("dimensions") is not None:
        return None
    return RowRule((inner[0],), _resizing("new_sizes", dim))


def _rechunked(eqn: Equation, dim: int, chunk: int) -> RowRule | None:
    """A reshape that divides rows into chunks, or joins chunks."""
    shape, out = _in(eqn), _out(eqn)
    for inner in range(len(shape)):
        if math.prod(shape[:inner]) != math.prod(out[:dim]):
            continue
        divides = shape[inner] == out[dim] * chunk and out[dim + 1 : dim + 2] == (chunk,)
        joins = out[dim] == shape[inner] * chunk and shape[inner + 1 : inner + 2] == (chunk,)
        if divides or joins:
            return RowRule((inner,), _resizing("new_sizes", dim), chunked=True)
    return None


def _dim_left(eqn: Equation, dropped: Sequence[int], dim: int) -> int:
    """Return which dim of the operand is a dim of the result, if some are dropped."""
    count = len(_in(eqn))
    return [i for i in range(count) if i not in {d % count for d in dropped}][dim]


def _same_dim(find: Callable[[Equation, int], int | None]) -> Rule:
    """A rule for operations with the rows of their operands, in a dim that is found from theirs."""

    def rule(eqn: Equation, result: int, dim: int) -> RowRule | None:
        inner = find(eqn, dim)
        return None if inner is None else RowRule((inner,) * len(eqn.invars), _bound)

    return rule


def _unless_along(axis: str, default: int | None = None) -> Rule:
    """A rule for operations along a dim that is not the one of positions."""

    def find(eqn: Equation, dim: int) -> int | None:
        along = eqn.params[axis] if default is None else eqn.params.get(axis, default)
        return None if along % len(_in(eqn)) == dim else dim

    return _same_dim(find)


def _stacked_dim(eqn: Equation, dim: int) -> int | None:
    axis = eqn.params["axis"] % len(_out(eqn))
    return None if dim == axis else dim - (dim > axis)


def _running(eqn: Equation, result: int, dim: int) -> RowRule | None:
    if eqn.params["axis"] != dim:
        return RowRule((dim,), _bound)
    return None if eqn.params["reverse"] else _whole(eqn)


def _concatenate(eqn: Equation, result: int, dim: int) -> RowRule | None:
    if eqn.params["dimension"] == dim:
        return _whole(eqn)
    return RowRule((dim,) * len(eqn.invars), _bound)


def _pad(eqn: Equation, result: int, dim: int) -> RowRule | None:
    low, high, interior = eqn.params["padding_config"][dim]
    if (low, high, interior) == (0, 0, 0):
        return RowRule((dim, None), _bound)
    return None if interior else _whole(eqn)


def _slice(eqn: Equation, result: int, dim: int) -> RowRule | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    if (starts[dim], limits[dim], strides[dim]) != (0, _in(eqn)[dim], 1):
        return _whole(eqn) if strides[dim] == 1 else None
    return RowRule((dim,), _resizing("limit_indices", dim))


def _dynamic_slice(eqn: Equation, result: int, dim: int) -> RowRule | None:
    if eqn.params["slice_sizes"][dim] != _in(eqn)[dim]:
        return None
    return RowRule((dim, *[None] * (len(eqn.invars) - 1)), _resizing("slice_sizes", dim))


def _iota(eqn: Equation, result: int, dim: int) -> RowRule | None:
    def run(eqn: Equation, operands: Sequence[Value], rows: Rows) -> list[Value]:
        dtype, shape = eqn.params["dtype"], _resized(_out(eqn), dim, rows.count)
        counted = jax.lax.broadcasted_iota(dtype, shape, eqn.params["dimension"])
        moves = eqn.params["dimension"] == dim
        return [counted + jnp.asarray(rows.start, dtype) if moves else counted]

    return RowRule((None,) * len(eqn.invars), run)


def _product(eqn: Equation, result: int, dim: int) -> RowRule | None:
    return RowRule(result_dims(eqn)[dim], _bound)


def _gather(eqn: Equation, result: int, dim: int) -> RowRule | None:
    numbers = eqn.params["dimension_numbers"]
    indices = [i for i in range(len(_out(eqn))) if i not in numbers.offset_dims]
    if dim not in indices:
        return None
    place = indices.index(dim)
    batched = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    return RowRule((batched.get(place), place), _bound)


def _convolution(eqn: Equation, result: int, dim: int) -> RowRule | None:
    numbers = eqn.params["dimension_numbers"]
    if dim == numbers.out_spec[0] and eqn.params["batch_group_count"] == 1:
        return RowRule((numbers.lhs_spec[0], None), _bound)
    if dim == numbers.out_spec[1]:
        return None
    place = numbers.out_spec[2:].index(dim)
    steps = eqn.params["window_strides"][place], eqn.params["lhs_dilation"][place]
    return _whole(eqn) if steps == (1, 1) else None


def _scan(eqn: Equation, result: int, dim: int) -> RowRule | None:
    """Stacked results have their rows from those of the sequences; the carry is kept elsewhere."""
    constants, carries = scan_counts(eqn)
    if result < carries or dim != 0 or not is_time_scan(eqn):
        return None
    before = constants + carries
    return RowRule((*[None] * before, *[0] * (len(eqn.invars) - before)), _bound)


def source_dim(eqn: Equation, dim: int) -> tuple[int, int]:
    """For an operation that needs whole operands, how its rows are related to theirs.

    Returns:
        The operand's dim of positions, and how many rows later than its own a row reads.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        return dim, params["start_indices"][dim]
    if name == "pad":
        return dim, -params["padding_config"][dim][0]
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        place = numbers.out_spec[2:].index(dim)
        size = _in(eqn, 1)[numbers.rhs_spec[2 + place]]
        reach = (size - 1) * params["rhs_dilation"][place]
        return numbers.lhs_spec[2 + place], reach - params["padding"][place][0]
    return dim, 0


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (*_REDUCTIONS, "argmax", "argmin"),
        _same_dim(lambda eqn, dim: _dim_left(eqn, eqn.params["axes"], dim)),
    ),
    **dict.fromkeys(_RUNNING, _running),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _same_dim(lambda eqn, dim: eqn.params["permutation"][dim]),
    "squeeze": _same_dim(lambda eqn, dim: _dim_left(eqn, eqn.params["dimensions"], dim)),
    "unstack": _same_dim(lambda eqn, dim: _dim_left(eqn, [eqn.params["axis"]], dim)),
    "stack": _same_dim(_stacked_dim),
    "rev": _same_dim(lambda eqn, dim: None if dim in eqn.params["dimensions"] else dim),
    "tile": _same_dim(lambda eqn, dim: dim if eqn.params["reps"][dim] == 1 else None),
    "split": _unless_along("axis"),
    "sort": _unless_along("dimension"),
    "top_k": _unless_along("axis", -1),
    "concatenate": _concatenate,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "dot_general": _product,
    "gather": _gather,
    "conv_general_dilated": _convolution,
    "scan": _scan,
}


_ZERO_TO_ZERO = primitives(
    """
    abs asin asinh atan atanh cbrt ceil convert_element_type copy copy_p erf expm1 floor
    integer_pow log1p name neg real reduce_precision round sign sin sinh sqrt square stop_gradient
    tan tanh
    """
)
_LOW_TO_LOW = primitives("convert_element_type copy copy_p name stop_gradient")


def hidden_after(name: str, states: Sequence[str]) -> str:
    """Return what a result is for pairs of positions that are hidden, from what the operands are.

    That is ``zero``, ``low`` (so negative that its exponential vanishes), ``positive``, or nothing.
    """
    some, first = set(states), states[0]
    if name in ("mul", "and") and "zero" in some:
        return "zero"
    if name in ("mul", "div") and first == "low" and states[1] == "positive":
        return "low"
    if name == "mul" and some == {"low", "positive"}:
        return "low"
    if name in ("div", *_ZERO_TO_ZERO) and first == "zero":
        return "zero"
    if name == "dot_general":
        return "zero" if "zero" in some else ""
    if name in ("add", "sub") and first == "low":
        return "low"
    if name == "add" and "low" in some:
        return "low"
    if name in ("exp", "exp2", "logistic") and first == "low":
        return "zero"
    if name in ("add", "sub", "or", "max", "min") and some == {"zero"}:
        return "zero"
    if name in _LOW_TO_LOW or name in ("max", "min"):
        return first if len(some) == 1 and first in ("low", "zero") else ""
    if name in ELEMENTWISE or name in _RUNNING:
        return ""
    moved = name not in ("argmax", "argmin", "reduce_prod")
    return first if moved and len(some) == 1 and first in ("low", "zero") else ""
