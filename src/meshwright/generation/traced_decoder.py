"""A decoder's program, traced for two lengths that must differ in nothing but their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.generation.decoder import LogitsOf, Weights
from meshwright.generation.positions import NotIncremental
from meshwright.program.dims.op import primitives
from meshwright.program.evaluate.evaluator import Environment, Evaluator, enter_call
from meshwright.program.jaxpr.equations import (
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    structs_of,
)

SHORT = 61
"""Positions of the short program: a number that is hardly the size of another dim."""
_SIZES = primitives(
    """
    shape new_sizes sizes limit_indices start_indices slice_sizes length padding_config padding
    sharding strides
    """
)
"""Parameters of operations that follow from the shapes of their operands and results."""
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True)
class TwoLengths:
    """The same program for few positions, and for as many as are generated.

    Attributes:
        short: for few; what is known of the program is found here.
        long: for all; this is evaluated.
    """

    short: ClosedJaxpr
    long: ClosedJaxpr


def trace_two_lengths(logits_of: LogitsOf, weights: Weights, length: int) -> TwoLengths:
    """Trace a model for two lengths; raises `NotIncremental` if they differ in more than shapes."""
    short = SHORT if length > SHORT else length - 1
    if short < 4:
        raise NotIncremental(f"{length} tokens are too few to tell positions from other dims")
    both = TwoLengths(_trace(logits_of, weights, short), _trace(logits_of, weights, length))
    _compare(both.short, both.long)
    return both


def _trace(logits_of: LogitsOf, weights: Weights, length: int) -> ClosedJaxpr:
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    structs = [*(jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights), tokens]
    traced = jax.make_jaxpr(lambda *args: logits_of(args[:-1], args[-1]))(*structs)
    inlined = Evaluator((_inline,)).run
    return jax.make_jaxpr(lambda *args: inlined(traced, args))(*structs_of(traced.jaxpr.invars))


def _inline(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate functions with derivatives of their own, and checkpoints, as what they contain."""
    name = eqn.primitive.name
    return enter_call(eqn, env) if name in _CUSTOM or name in REMATS else None


def _compare(short: ClosedJaxpr, long: ClosedJaxpr) -> None:
    if len(short.jaxpr.eqns) != len(long.jaxpr.eqns):
        raise NotIncremental("the model runs other operations for another number of tokens")
    names: dict[Var, Var] = {}
    for one, other in zip(short.jaxpr.eqns, long.jaxpr.eqns, strict=True):
        if not _alike(one, other, names):
            raise NotIncremental.at(one, "depends on the number of tokens")
        names.update(zip(one.outvars, other.outvars, strict=True))
    for one, other in zip(short.consts, long.consts, strict=True):
        if not _same_start(np.asarray(one), np.asarray(other)):
            raise NotIncremental("a constant of the model depends on the number of tokens")


def _alike(one: Equation, other: Equation, names: Mapping[Var, Var]) -> bool:
    if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
        return False
    if not all(_same_atom(a, b, names) for a, b in zip(one.invars, other.invars, strict=True)):
        return False
    if one.params.keys() != other.params.keys():
        return False
    return all(
        key in _SIZES or _same_param(value, other.params[key]) for key, value in one.params.items()
    )


def _same_atom(one: Atom, other: Atom, names: Mapping[Var, Var]) -> bool:
    if isinstance(one, Literal) or isinstance(other, Literal):
        both = isinstance(one, Literal) and isinstance(other, Literal)
        return both and bool(np.array_equal(one.val, other.val, equal_nan=_is_float(one)))
    return one not in names or names[one] is other


def _is_float(literal: Literal) -> bool:
    return np.issubdtype(np.asarray(literal.val).dtype, np.inexact)


def _same_param(one: Any, other: Any) -> bool:
    if isinstance(one, ClosedJaxpr):
        try:
            _compare(one, other)
        except NotIncremental:
            return False
        return True
    if isinstance(one, tuple) and one and isinstance(one[0], ClosedJaxpr):
        return all(_same_param(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or str(one) == str(other)


def _same_start(one: np.ndarray, other: np.ndarray) -> bool:
    if one.ndim != other.ndim or one.dtype != other.dtype:
        return False
    if not np.issubdtype(one.dtype, np.number) and one.dtype != bool:
        return one.shape == other.shape
    common = tuple(slice(min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    return bool(np.array_equal(one[common], other[common]))


def by_short(both: TwoLengths) -> Mapping[Var, Var]:
    """Return the variables of the long program by those of the short one."""
    pairs: list[tuple[Sequence[Any], Sequence[Any]]] = [
        (both.short.jaxpr.invars, both.long.jaxpr.invars),
        (both.short.jaxpr.constvars, both.long.jaxpr.constvars),
    ]
    for one, other in zip(both.short.jaxpr.eqns, both.long.jaxpr.eqns, strict=True):
        pairs.append((one.outvars, other.outvars))
    return {a: b for one, other in pairs for a, b in zip(one, other, strict=True)}


def logits_shape(closed: ClosedJaxpr) -> tuple[int, ...]:
    """Return the shape of a program's logits."""
    return aval_of(closed.jaxpr.outvars[0]).shape
