"""The two products of an attention, found by following scores from the first to the second."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.op import free_dims, result_dims
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import Equation, Literal, Var, aval_of

REPEATS = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze"})
"""Operations by which query heads that share a key head get one each."""

_REDUCES = ("reduce_", "arg", "cum")


class AttentionProducts(NamedTuple):
    """The two products of an attention.

    Attributes:
        scores: the product of queries and keys.
        key_side: which of its operands is the key.
        values: the product of weights and values.
        weights_side: which of its operands is the weights.
        dims: where each dim of the scores is in the weights; None if it is not.
    """

    scores: Equation
    key_side: int
    values: Equation
    weights_side: int
    dims: tuple[int | None, ...]


def score_products(classes: DimClasses, program: ProgramDims) -> Iterator[Equation]:
    """Yield the products that relate positions to positions."""
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and all(
            not isinstance(atom, Literal)
            and program.values[atom].has_data
            and set(classes.positions(program, atom)) & set(free_dims(eqn, side))
            for side, atom in enumerate(eqn.invars)
        ):
            yield eqn


def follow_scores(
    classes: DimClasses, program: ProgramDims, product: Equation
) -> AttentionProducts | None:
    """Follow scores to the product with values; None if they take another way."""
    of_operands = _result_sides(product)
    positions = classes.positions(program, product.outvars[0])
    tracked: dict[Var, tuple[int | None, ...]] = {
        product.outvars[0]: tuple(range(len(of_operands)))
    }
    eqns = program.jaxpr.eqns
    for eqn in eqns[eqns.index(product) + 1 :]:
        for side, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or atom not in tracked:
                continue
            dims = tracked[atom]
            if eqn.primitive.name == "dot_general":
                summed = eqn.params["dimension_numbers"][0][side]
                keys = [of_operands[n] for n in positions if dims[n] in summed]
                if len(keys) != 1 or keys[0] is None:
                    return None
                return AttentionProducts(product, keys[0], eqn, side, dims)
            if eqn.primitive.name.startswith(_REDUCES):
                continue
            moved = [_moved(eqn, side, d) for d in dims]
            if all(moved[n] is not None for n in positions):
                tracked[eqn.outvars[0]] = tuple(moved)
    return None


def _result_sides(product: Equation) -> list[int | None]:
    """Return for each dim of a product's result the operand that it is from; None for both."""
    return [pair.index(None) ^ 1 if None in pair else None for pair in result_dims(product)]


def _moved(eqn: Equation, side: int, dim: int | None) -> int | None:
    """Return where an operand's dim is in the result; None if it is not there."""
    if dim is None:
        return None
    before, after = aval_of(eqn.invars[side]).shape, aval_of(eqn.outvars[0]).shape
    if eqn.primitive.name == "transpose":
        return list(eqn.params["permutation"]).index(dim)
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][dim]
    if before == after:
        return dim
    ahead = math.prod(before[:dim])
    same = (n for n, s in enumerate(after) if s == before[dim] and math.prod(after[:n]) == ahead)
    return next(same, None) if eqn.primitive.name in REPEATS else None
