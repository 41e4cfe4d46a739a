"""Sharding constraints in the model's own code, carried through the program as named values.

A constraint binds its result to a mesh, but a program is traced before there is one, and its author
may have had another. While a loss is traced, constraints become values with a name that says which
axes were asked for; `on_mesh/sharding_constraints` turns these into layouts on the mesh.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.mesh.axes import entry_names
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.jaxpr.equations import Equation, Value
from meshwright.runtime.jax_internals import replaced_constraints

_MARK = "layout asked for by the model: "
_FREE = "unconstrained"


@dataclass(frozen=True)
class RequestedLayout:
    """What a sharding constraint in the model's code asks for.

    For each dim, the axes that shard it, where None leaves it to the compiler; or what is asked for
    instead, if it is not sharding over named axes.
    """

    dims: tuple[tuple[str, ...] | None, ...]
    other: str = ""

    def __str__(self) -> str:
        if self.other:
            return self.other
        entries = [
            "UNCONSTRAINED"
            if names is None
            else repr(names[0] if len(names) == 1 else names or None)
            for names in self.dims
        ]
        return f"P({', '.join(entries)})"


def recorded_layouts() -> AbstractContextManager[None]:
    """Record the model's sharding constraints, instead of applying them, while it is traced."""
    return replaced_constraints(_record)


def record_constraint(eqn: Equation, env: Environment) -> list[Value] | None:
    """Record a constraint in a function that JAX had traced before, and reuses."""
    if eqn.primitive.name != "sharding_constraint":
        return None
    (x,) = env.operands(eqn)
    return [_record(x, eqn.params["sharding"])]


def requested_layout(eqn: Equation) -> RequestedLayout | None:
    """Return the layout that an equation records; None for any other equation."""
    name = eqn.params.get("name")
    if eqn.primitive.name != "name" or not isinstance(name, str) or not name.startswith(_MARK):
        return None
    dims, other = json.loads(name.removeprefix(_MARK))
    return RequestedLayout(tuple(None if d == _FREE else tuple(d) for d in dims), other)


def _record(x: Any, sharding: Any) -> jax.Array:
    dims: list[Any] = []
    other = ""
    if isinstance(sharding, NamedSharding) and sharding.memory_kind in (None, "device"):
        entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        free = PartitionSpec.UNCONSTRAINED
        dims = [_FREE if entry is free else list(entry_names(entry)) for entry in entries]
    elif isinstance(sharding, NamedSharding):
        other = f"memory of kind {sharding.memory_kind}"
    else:
        other = type(sharding).__name__
    return checkpoint_name(x, _MARK + json.dumps([dims, other]))
