"""Whether an optimizer updates a stack of blocks exactly as it updates the single blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxpr.equations import (
    CALLS,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    called_jaxpr,
)
from meshwright.step.objective import accepted

_SPREADS_SCALARS = frozenset({"broadcast_in_dim", "reshape", "squeeze"})

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class Name:
    """The name of a parameter, as a leaf of a tree."""

    value: Any


def owners(transformation: optax.GradientTransformation, state: Any, names: Tree) -> list[Any]:
    """Return, for each leaf of an optimizer state, the name of the parameter it belongs to.

    ``names`` holds a `Name` for each parameter; leaves of no parameter (counters) give None.
    """
    try:
        marked = optax.tree_utils.tree_map_params(
            transformation,
            # A masked part of the optimizer has no leaf for the parameters of another part.
            lambda leaf, name: leaf if isinstance(leaf, optax.MaskedNode) else name,
            state,
            names,
            transform_non_params=lambda _: Name(None),
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
        leaves = jax.tree.leaves(marked, is_leaf=lambda leaf: isinstance(leaf, Name))
        return [name.value for name in leaves]
    except Exception:
        return _owners_by_path(state, names)


def _owners_by_path(state: Any, names: Tree) -> list[Any]:
    """Return the owners as the parameters whose path ends that of the leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(names, is_leaf=lambda x: isinstance(x, Name))
    by_path = {path: name.value for path, name in flat}
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    endings = ((path[start:] for start in range(len(path))) for path, _ in leaves)
    return [next((by_path[e] for e in each if e in by_path), None) for each in endings]


def treats_stacks_alike(
    transformation: optax.GradientTransformation,
    *,
    stacked: Tree,
    single: Tree,
    stack_of: Mapping[str, str],
) -> bool:
    """Whether updating stacked parameters equals stacking the updates of the single ones.

    It does if every operation is elementwise and the elements of each block go through the same
    operations as those of the stack; a mask by rank or by path would make a difference.
    ``stack_of`` is from the path of a single parameter to that of its stack.
    """
    table = _Table()
    try:
        of_stacks = _outputs(transformation, stacked, table, {})
        of_blocks = of_stacks and _outputs(transformation, single, table, stack_of)
    except Exception:
        # Labels or masks written for the parameters of the model do not fit stacks, and some
        # optimizers evaluate the loss.
        return False
    if of_stacks is None or of_blocks is None:
        return False
    return all(
        numbers == of_stacks[stack_of.get(path, path)] for path, numbers in of_blocks.items()
    )


def _outputs(
    transformation: optax.GradientTransformation,
    params: Tree,
    table: _Table,
    stack_of: Mapping[str, str],
) -> dict[Any, list[int]] | None:
    """Return, by parameter, the numbers of its update and its optimizer state."""
    value = {"value": np.float32(0)} if "value" in accepted(transformation) else {}

    def run(gradients: Any, params: Any, value: Any) -> Any:
        return transformation.update(gradients, transformation.init(params), params, **value)

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(params, params, value)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    names_of = jax.tree.unflatten(jax.tree.structure(params), [Name(path) for path in paths])
    inputs = [(kind, stack_of.get(path, path)) for kind in ("gradient", "param") for path in paths]
    inputs += [("value", name) for name in value]
    names = {v: table.number(key) for v, key in zip(closed.jaxpr.invars, inputs, strict=True)}
    names |= table.constants(closed)
    if not table.read(closed.jaxpr, names):
        return None
    outputs = defaultdict[Any, list[int]](list)
    state_owners = owners(transformation, shapes[1], names_of)
    for atom, path in zip(closed.jaxpr.outvars, [*paths, *state_owners], strict=True):
        outputs[path].append(table.name(atom, names))
    return {path: sorted(numbers) for path, numbers in outputs.items()}


class _Table:
    """Numbers values by how they are computed, regardless of shape."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def name(self, atom: Any, names: Mapping[Var, int]) -> int:
        return self._constant(atom.val) if isinstance(atom, Literal) else names[atom]

    def constants(self, closed: ClosedJaxpr) -> dict[Var, int]:
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        return {variable: self._constant(value) for variable, value in pairs}

    def read(self, jaxpr: Jaxpr, names: dict[Var, int]) -> bool:
        """Number the variables of a program; False if it is not elementwise."""
        for eqn in jaxpr.eqns:
            primitive = eqn.primitive.name
            operands = [self.name(atom, names) for atom in eqn.invars]
            if primitive in CALLS:
                closed = called_jaxpr(eqn)
                inner = dict(zip(closed.jaxpr.invars, operands, strict=True))
                inner |= self.constants(closed)
                if not self.read(closed.jaxpr, inner):
                    return False
                results = [self.name(atom, inner) for atom in closed.jaxpr.outvars]
            else:
                shapes = {s for a in (*eqn.invars, *eqn.outvars) if (s := aval_of(a).shape)}
                spreads = primitive in _SPREADS_SCALARS
                if shapes and (len(shapes) > 1 or not (spreads or primitive in ELEMENTWISE)):
                    return False
                params = "" if spreads else str(sorted(eqn.params.items()))
                results = [
                    self.number((primitive, params, *operands, position))
                    for position in range(len(eqn.outvars))
                ]
            names.update(zip(eqn.outvars, results, strict=True))
        return True

    def _constant(self, value: Any) -> int:
        array = np.asarray(value)
        return self.number(("constant", str(array.dtype), array.tobytes()))
