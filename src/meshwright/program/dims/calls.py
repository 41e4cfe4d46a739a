"""Rules for equations that contain programs: loops, branches, calls.

A nested program is walked at every call, with new dims: JAX shares one jaxpr between unrelated
calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshwright.program.dims.factors import Dim, Dims
from meshwright.program.dims.op import Op, Value, is_inexact, shape_of
from meshwright.program.jaxpr.equations import Jaxpr, scan_counts

Enter = Callable[[Jaxpr, Sequence[Value], int], list[Value]]
"""Walks a nested program that runs this many times; returns its results."""

CallRule = Callable[[Op, Enter], list[Value]]

_BODY_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def body_of(op: Op) -> Jaxpr | None:
    """Return the program of a plain call, with the same inputs and outputs as the equation."""
    for key in _BODY_KEYS:
        body = _jaxpr(op.params.get(key))
        if not isinstance(body, Jaxpr):
            continue
        if _fits(body.invars, op.avals) and _fits(body.outvars, op.out_avals):
            return body
    return None


def call(op: Op, enter: Enter) -> list[Value]:
    """Walk the body of a jit, remat, custom derivative or similar call."""
    body = body_of(op)
    assert body is not None
    return enter(body, op.operands, 1)


def scan(op: Op, enter: Enter) -> list[Value]:
    """Walk the body once: carries keep their dims, scanned operands lose the first one."""
    consts, carries = scan_counts(op.equation)
    body, length = _jaxpr(op.params["jaxpr"]), op.params["length"]
    start = consts + carries
    values = list(op.operands[:consts])
    values += _carried(op, range(consts, start))
    values += [value._replace(dims=value.dims[1:]) for value in op.operands[start:]]

    loop = op.factors.dim(length)
    for operand in range(start, len(op.operands)):
        op.unify(loop, op.dims(operand)[0])
        op.note("block", [loop], op.nbytes(operand))
    results = enter(body, values, length)
    for before, after in zip(op.operands[consts:start], results[:carries], strict=True):
        op.unify_all(before.dims, after.dims)
    if results[carries:]:
        op.note("block", [loop], sum(op.out_nbytes(i) for i in range(carries, len(results))))
    stacked = [value._replace(dims=(loop, *value.dims)) for value in results[carries:]]
    return results[:carries] + stacked


def while_loop(op: Op, enter: Enter) -> list[Value]:
    """Walk condition and body once; the number of iterations is unknown and counts as one."""
    num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    start = num_cond + num_body
    carried = _carried(op, range(start, len(op.operands)))
    enter(_jaxpr(op.params["cond_jaxpr"]), [*op.operands[:num_cond], *carried], 1)
    results = enter(_jaxpr(op.params["body_jaxpr"]), [*op.operands[num_cond:start], *carried], 1)
    for before, after in zip(carried, results, strict=True):
        op.unify_all(before.dims, after.dims)
    return results


def cond(op: Op, enter: Enter) -> list[Value]:
    """Walk every branch and merge their results."""
    branches = [enter(_jaxpr(branch), op.operands[1:], 1) for branch in op.params["branches"]]
    merged = list[Value]()
    for first, *others in zip(*branches, strict=True):
        for other in others:
            op.unify_all(first.dims, other.dims)
        merged.append(_combined([first, *others]))
    return merged


def shard_map(op: Op, enter: Enter) -> list[Value]:
    """Walk the body of a shard_map, in which a sharded dim is its minor factor."""
    body = _jaxpr(op.params["jaxpr"])
    values = [
        value._replace(dims=_local(op, operand, shape_of(var.aval)))
        for operand, (value, var) in enumerate(zip(op.operands, body.invars, strict=True))
    ]
    results = enter(body, values, 1)
    return [
        value._replace(dims=_whole(op, value.dims, shape_of(var.aval), op.out_shape(result)))
        for result, (value, var) in enumerate(zip(results, body.outvars, strict=True))
    ]


def _local(op: Op, operand: int, shape: Sequence[int]) -> Dims:
    dims = list[Dim]()
    for dim, size, local in zip(op.dims(operand), op.shape(operand), shape, strict=True):
        devices, part = op.factors.dim(size // local), op.factors.dim(local)
        if op.unify(dim, devices + part):
            part = op.factors.dim(local)
        op.note("block", [devices], op.nbytes(operand))
        dims.append(part)
    return tuple(dims)


def _whole(op: Op, dims: Dims, local: Sequence[int], shape: Sequence[int]) -> Dims:
    sizes = zip(dims, local, shape, strict=True)
    return tuple(op.factors.dim(size // part) + dim for dim, part, size in sizes)


def _carried(op: Op, operands: Iterable[int]) -> list[Value]:
    """Return the carries inside the body: after one iteration they may depend on everything."""
    after = _combined(op.operands)
    return [
        op.operands[operand]._replace(
            params=frozenset(),
            has_data=after.has_data,
            has_grad=after.has_grad and is_inexact(op.avals[operand]),
        )
        for operand in operands
    ]


def _combined(values: Sequence[Value]) -> Value:
    """Return the first value, with the properties that any of them has."""
    if not values:
        return Value((), frozenset(), False, False, -1)
    return values[0]._replace(
        params=frozenset[int]().union(*(value.params for value in values)),
        has_data=any(value.has_data for value in values),
        has_grad=any(value.has_grad for value in values),
    )


def _jaxpr(program: Any) -> Any:
    """Return the jaxpr inside a closed one, and anything else as it is."""
    return getattr(program, "jaxpr", program)


def _fits(variables: Sequence[Any], avals: Sequence[Any]) -> bool:
    return [shape_of(v.aval) for v in variables] == [shape_of(a) for a in avals]


RULES: Mapping[str, CallRule] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
}
