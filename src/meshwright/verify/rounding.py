"""How far rounding alone may move a result: the tolerance of proofs that are not in float64."""

from __future__ import annotations

import math

import jax.numpy as jnp

from meshwright.plan import Plan
from meshwright.program.jaxprs import Jaxpr, aval_of
from meshwright.program.policy import COMPUTE_DTYPES
from meshwright.program.trace import TracedLoss


def rounding_tolerance(plan: Plan, traced: TracedLoss) -> float:
    """Return how far two orders of summation may lie apart, relative to what is summed.

    Every matrix product of the program rounds its result to the compute format once, forward and
    twice backward; independent roundings add like a random walk. Sums over n terms in float32 add
    √n roundings of their own.
    """
    dtype = COMPUTE_DTYPES[plan.precision] or jnp.float32
    products, terms = _count_products(traced.closed.jaxpr)
    rounding = float(jnp.finfo(dtype).eps)
    summing = float(jnp.finfo(jnp.float32).eps)
    return 4 * (rounding * math.sqrt(3 * max(products, 1)) + summing * math.sqrt(terms))


def _count_products(jaxpr: Jaxpr, times: int = 1) -> tuple[int, int]:
    """Return how many products the program has, and the most terms one of their gradients sums."""
    products, terms = 0, 1
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            columns = max(aval_of(eqn.invars[1]).shape[-1], 1)
            products += times
            terms = max(terms, math.prod(aval_of(eqn.outvars[0]).shape) // columns)
        if eqn.primitive.name == "scan":
            inner = eqn.params["jaxpr"].jaxpr
            more, longest = _count_products(inner, times * eqn.params["length"])
            products, terms = products + more, max(terms, longest)
    return products, terms
