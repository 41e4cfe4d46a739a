"""Finds the products with weights in loops that carry a state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import jax.numpy as jnp

from meshwright.program.evaluate.dependencies import (
    dependent_variables,
    needed_equations,
    variables,
)
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of, scan_counts
from meshwright.program.kernels.regions import Graph, NotReplaced


@dataclass(frozen=True)
class WeightProduct:
    """A product of rows and a weight in the body of a loop.

    Attributes:
        eqn: the product.
        by: the dim of the weight that is summed over.
        bias: a vector that is added to all rows; None without.
        result: the product, or the sum.
    """

    eqn: Equation
    by: int
    bias: Var | None
    result: Var

    @property
    def rows(self) -> Atom:
        """What the weight is multiplied with."""
        return self.eqn.invars[0]

    @property
    def width(self) -> int:
        """The features of its result."""
        return aval_of(self.result).shape[-1]


Group = Sequence[WeightProduct]
"""Products of the same rows."""


@dataclass(frozen=True)
class RecurrenceMatch:
    """What can be taken out of a loop.

    Attributes:
        constant: equations of the body that read the constants of the loop alone.
        casts: casts of what the loop slices.
        before: products of these slices or casts.
        inside: products of the state.
        others: the equations that stay in the loop, products of the state among them.
    """

    constant: Sequence[Equation]
    casts: Sequence[Equation]
    before: Sequence[Group]
    inside: Sequence[Group]
    others: Sequence[Equation]


def match_recurrence(eqn: Equation) -> RecurrenceMatch | None:
    """Return what can be taken out of a loop; None if no state is multiplied with a weight."""
    jaxpr, (num_consts, num_carry) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    if jaxpr.effects:
        return None
    graph, known = Graph(jaxpr), {*jaxpr.constvars, *jaxpr.invars[:num_consts]}
    constant: list[Equation] = []
    for inner in graph.live:
        if inner.invars and known.issuperset(variables(inner.invars)):
            constant.append(inner)
            known.update(inner.outvars)
    state = dependent_variables(graph.live, jaxpr.invars[num_consts : num_consts + num_carry])
    slices = set(jaxpr.invars[num_consts + num_carry :])
    products = [found for e in graph.live if (found := _product(graph, e, known)) is not None]
    order = [*dict.fromkeys(product.rows for product in products)]
    products.sort(key=lambda product: order.index(product.rows))
    groups = [list(group) for _, group in groupby(products, lambda product: product.rows)]
    if not any(group[0].rows in state for group in groups):
        return None
    *lead, inputs = aval_of(next(g[0].rows for g in groups if g[0].rows in state)).shape
    if math.prod(lead) > inputs:
        raise NotReplaced(f"its {math.prod(lead):,} rows are more than the {inputs:,} of a weight")
    before = [g for g in groups if graph.before(g[0].rows, "convert_element_type") in slices]
    casts = needed_equations(jaxpr.eqns, [group[0].rows for group in before], slices)
    given = {*known, *(product.result for group in before for product in group)}
    others = needed_equations(jaxpr.eqns, jaxpr.outvars, given)
    return RecurrenceMatch(constant, casts, before, [g for g in groups if g not in before], others)


def _product(graph: Graph, eqn: Equation, constants: set[Var]) -> WeightProduct | None:
    if eqn.primitive.name != "dot_general":
        return None
    rows, weight = eqn.invars
    (of_rows, of_weight), batch = eqn.params["dimension_numbers"]
    result, bias = eqn.outvars[0], None
    last, dtype = len(aval_of(rows).shape) - 1, aval_of(result).dtype
    of_constant = weight in constants and rows not in constants
    plain = not any(batch) and tuple(of_rows) == (last,) and len(aval_of(weight).shape) == 2
    same = {aval_of(v).dtype for v in eqn.invars} == {dtype} and jnp.issubdtype(dtype, jnp.floating)
    if not (of_constant and plain and same):
        return None
    readers = graph.read_by(result)
    if len(readers) == 1 and not graph.is_returned(result) and readers[0].primitive.name == "add":
        other = next((atom for atom in readers[0].invars if atom is not result), result)
        shape = aval_of(other).shape
        is_vector = shape[-1:] == aval_of(result).shape[-1:] == (math.prod(shape),)
        if not isinstance(other, Literal) and other in constants and is_vector:
            result, bias = readers[0].outvars[0], other
    return WeightProduct(eqn, of_weight[0], bias, result)
