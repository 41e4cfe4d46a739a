"""Rectified values, whose gradient asks the result that a product read instead of the operand."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.evaluate.dependencies import variables
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import (
    PRODUCTS,
    Equation,
    Value,
    called_jaxpr,
    pushforward_of,
    structs_of,
)
from meshwright.program.jaxpr.fingerprint import fingerprint
from meshwright.program.jaxpr.walks import all_equations
from meshwright.program.kernels.regions import Graph, Region
from meshwright.program.kernels.surroundings import Scope


@jax.custom_vjp
def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


def _backward(result: Any, cotangent: Any) -> tuple[Any]:
    # Otherwise the compiler would ask what the result was computed from, and read all of that.
    result, cotangent = lax.optimization_barrier((result, cotangent))
    return (jnp.where(result > 0, cotangent, 0),)


_relu.defvjp(lambda x: (_relu(x),) * 2, _backward)


@dataclass(frozen=True)
class ReluKernel:
    """Evaluates `jax.nn.relu`."""

    name: str = "by result"

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the result."""
        return [_relu(env.read(region.inputs[0]))]


def relus(scope: Scope) -> Iterator[Equation]:
    """Yield the equations that products read, and that have the derivative of `jax.nn.relu`.

    None in a loop, which would save a result twice: as it is, and as the product reads it.
    """
    graph = scope.graph
    for eqn in graph.live if scope.outer is None else ():
        if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1:
            continue
        stored = any(e.primitive.name in PRODUCTS for e in graph.read_by(eqn.outvars[0]))
        inside = {e.primitive.name for e, _ in all_equations(called_jaxpr(eqn).jaxpr)}
        known = stored and "max" in inside and _pushforward(*structs_of(eqn.invars))
        if known and fingerprint(pushforward_of(eqn)) == known:
            yield eqn


def match_relu(graph: Graph, eqn: Equation) -> Region:
    """Return the region of one equation."""
    return graph.region((eqn,), tuple(variables(eqn.invars)), tuple(eqn.outvars), ReluKernel())


@cache
def _pushforward(struct: jax.ShapeDtypeStruct) -> str:
    """Return the fingerprint of what `jax.nn.relu` does to values and their tangents."""
    both = jax.make_jaxpr(lambda x, t: [*jax.jvp(jax.nn.relu, (x,), (t,))])
    return fingerprint(both(struct, struct))
