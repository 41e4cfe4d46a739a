"""Products that share an operand: weights of one input are joined, repeated keys are read once."""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.dims.op import free_dims
from meshwright.program.evaluate.dependencies import dependent_variables, needed_equations
from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.jaxpr.equations import (
    REARRANGES,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    structs_of,
)

_OF_WEIGHTS = REARRANGES - {"broadcast_in_dim", "dynamic_slice"} | {"convert_element_type"}
"""Operations after which a weight is still one."""


def share_operands(closed: ClosedJaxpr, joinable: int, *, also: Sequence[Var] = ()) -> ClosedJaxpr:
    """Return a program that computes the same with fewer products, and smaller operands.

    A step of one token takes as long as reading weights and caches, and starting operations. So an
    input is multiplied with all of its weights at once, and heads that share a key read it once
    instead of a copy for each.

    Its first inputs are weights, of which so many are ``joinable``, and the last one is the tokens.
    ``also`` is what it returns besides its results.
    """
    makers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    of_tokens = dependent_variables(closed.jaxpr.eqns, [closed.jaxpr.invars[-1]])
    rules = (
        *(_Joined(closed, group) for group in _groups(closed, joinable, makers, of_tokens)),
        partial(_unrepeat, makers=makers),
        partial(_scale_last, makers=makers, of_tokens=of_tokens),
    )

    def run(*args: Value) -> list[Value]:
        evaluator = Evaluator(rules)
        env = evaluator.environment(closed, args)
        evaluator.equations(closed.jaxpr.eqns, env)
        return [env.value(atom) for atom in (*closed.jaxpr.outvars, *also)]

    return jax.make_jaxpr(run)(*structs_of(closed.jaxpr.invars))


class _Joined:
    """Computes the products of one input with several weights as one."""

    def __init__(self, closed: ClosedJaxpr, group: Sequence[tuple[Equation, int]]) -> None:
        self._eqns = [eqn for eqn, _ in group]
        self._side = group[0][1]
        self._ahead = needed_equations(
            closed.jaxpr.eqns, [e.invars[self._side] for e in self._eqns]
        )
        self._results: list[Value] = []

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Return the result of one of the products."""
        number = next((n for n, own in enumerate(self._eqns) if own is eqn), None)
        if number is None:
            return None
        if number == 0:
            self._results = self._all(eqn, env)
        return [self._results[number]]

    def _all(self, eqn: Equation, env: Environment) -> list[Value]:
        env.evaluator.extend(env.values, self._ahead)
        weights = [env.value(own.invars[self._side]) for own in self._eqns]
        free = free_dims(eqn, self._side)[0]
        operands = env.operands(eqn)
        operands[self._side] = jnp.concatenate(weights, axis=free)
        (product,) = bind(eqn, operands)
        dim = len(free_dims(eqn, 0)) if self._side else 0
        return [*jax.lax.split(product, [w.shape[free] for w in weights], axis=dim)]


def _groups(
    closed: ClosedJaxpr, joinable: int, makers: Mapping[Var, Equation], of_tokens: Set[Var]
) -> list[list[tuple[Equation, int]]]:
    """Return the products of each input with weights of one form, if there are several."""
    jaxpr = closed.jaxpr
    found: dict[Any, list[tuple[Equation, int]]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"][1] != ((), ()):
            continue
        for side, weight in enumerate(eqn.invars):
            given = eqn.invars[1 - side]
            if isinstance(given, Literal):
                continue
            if given not in of_tokens or not _is_weight(weight, jaxpr.invars[:joinable], makers):
                continue
            free = free_dims(eqn, side)
            shape = list(aval_of(weight).shape)
            if free:
                shape[free[0]] = -1
                key = (given, side, str(eqn.params), tuple(shape), aval_of(weight).dtype)
                found.setdefault(key, []).append((eqn, side))
    return [group for group in found.values() if len(group) > 1]


def _is_weight(atom: Atom, weights: Sequence[Var], makers: Mapping[Var, Equation]) -> bool:
    while not isinstance(atom, Literal) and atom in makers:
        if makers[atom].primitive.name not in _OF_WEIGHTS:
            return False
        atom = makers[atom].invars[0]
    return atom in weights


def _unrepeat(
    eqn: Equation, env: Environment, makers: Mapping[Var, Equation]
) -> list[Value] | None:
    """Multiply with an operand whose elements are repeated along a dim of the batch, unrepeated."""
    if eqn.primitive.name != "dot_general":
        return None
    for side, batch in enumerate(eqn.params["dimension_numbers"][1]):
        found = _source(eqn.invars[side], env, makers)
        if found is not None and found[1] in batch:
            return [_grouped(eqn, env, side, *found)]
    return None


def _grouped(eqn: Equation, env: Environment, side: int, value: Value, dim: int) -> Value:
    """Return a product whose operand on one side is each element of a value, repeated in a dim."""
    sums, batch = eqn.params["dimension_numbers"]
    other, place = 1 - side, batch[side].index(dim)
    split = batch[other][place]

    def moved(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(d + (d > split) for d in dims)

    given = env.operands(eqn)[other]
    sizes = (*given.shape[:split], value.shape[dim], -1, *given.shape[split + 1 :])
    # The repeated operand comes last, so that its own dims do, such as the positions of keys.
    pairs = [(moved(dims[other]), tuple(dims[side])) for dims in (sums, batch)]
    params = {**eqn.params, "dimension_numbers": tuple(pairs)}
    (product,) = bind(eqn.replace(params=params), [given.reshape(sizes), value])
    # The dim of the group is among those of the other operand; it belongs after that of the heads.
    count, own = len(batch[side]), [*moved(free_dims(eqn, other)), split + 1]
    product = jnp.moveaxis(product, count + sorted(own).index(split + 1), place + 1)
    product = jax.lax.collapse(product, place, place + 2)
    others = [*range(count, count + len(own) - 1)]
    return product if side else jnp.moveaxis(product, others, [d - others[-1] - 1 for d in others])


def _scale_last(
    eqn: Equation, env: Environment, makers: Mapping[Var, Equation], of_tokens: Set[Var]
) -> list[Value] | None:
    """Multiply with a number of each row before its weights, not with their product.

    A norm is one operation on a GPU then, instead of three.
    """
    for side, atom in enumerate(eqn.invars if eqn.primitive.name == "mul" else ()):
        made = None if isinstance(atom, Literal) else makers.get(atom)
        if made is None or made.primitive.name != "mul":
            continue
        parts = [part for part in made.invars if not isinstance(part, Literal)]
        if len(parts) == 2 and all(aval_of(part).size < aval_of(atom).size for part in parts):
            first, second = map(env.value, sorted(parts, key=lambda part: part not in of_tokens))
            (product,) = bind(eqn, [env.value(eqn.invars[1 - side]), first])
            return bind(eqn, [product, second])
    return None


def _source(
    atom: Atom, env: Environment, makers: Mapping[Var, Equation]
) -> tuple[Value, int] | None:
    """Return a value before each element was repeated along a dim, and the dim; None if not."""
    after: list[Equation] = []
    while not isinstance(atom, Literal) and (eqn := makers.get(atom)) is not None:
        if eqn.primitive.name == "reshape":
            break
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            return None
        after.append(eqn)
        atom = eqn.invars[0]
    else:
        return None
    (repeated,) = eqn.invars[:1]
    made = None if isinstance(repeated, Literal) else makers.get(repeated)
    if made is None or made.primitive.name != "broadcast_in_dim":
        return None
    shape, wide = aval_of(eqn.outvars[0]).shape, aval_of(repeated).shape
    small, placed = aval_of(made.invars[0]).shape, made.params["broadcast_dimensions"]
    sizes = [small[placed.index(d)] if d in placed else 1 for d in range(len(wide))]
    repeats = [d for d, size in enumerate(sizes) if size != wide[d]]
    if len(repeats) != 1 or len(wide) != len(shape) + 1 or repeats[0] == 0:
        return None
    dim = repeats[0] - 1
    if (*wide[:dim], wide[dim] * wide[dim + 1], *wide[dim + 2 :]) != shape:
        return None
    value = env.value(made.invars[0]).reshape(*wide[: dim + 1], *wide[dim + 2 :])
    for moved in reversed(after):
        (value,) = bind(moved, [value])
        if moved.primitive.name == "transpose":
            dim = moved.params["permutation"].index(dim)
    return value, dim
