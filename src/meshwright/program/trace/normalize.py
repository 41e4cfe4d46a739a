"""The traced program in normal form: calls inlined, transposes folded into products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from meshwright.program.evaluate.control_flow import enter_remat
from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.jaxpr.equations import (
    REMATS,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Value,
    Var,
    bind,
    called_jaxpr,
    name_stack,
    structs_of,
)
from meshwright.program.jaxpr.names import MODULE_MARK, module_of, modules_of, rename_module
from meshwright.program.trace.copies import Places, find_places, rename_copies


def normalize(
    closed: ClosedJaxpr, leaves: Sequence[str] = (), places: Places | None = None
) -> ClosedJaxpr:
    """Return the same program without calls, so that each equation stands in one place only.

    Args:
        closed: the program.
        leaves: paths of the model's leaves, which are its first inputs.
        places: where modules of each class are, to name equations of copies after them.

    A product with a transposed weight (tied embeddings) becomes a product with the weight itself,
    whose gradient then has the weight's own shape: the partial gradients of several uses can be
    added before they are reduced over the mesh.
    """
    run = lambda *args: _Normal(leaves, args, places or {}).run(closed, args)  # noqa: E731
    return jax.make_jaxpr(run)(*structs_of(closed.jaxpr.invars))


class _Normal(Evaluator):
    def __init__(self, leaves: Sequence[str], inputs: Sequence[Any], places: Places) -> None:
        rules = (_remat, self._leaf_cast, self._transpose, self._product)
        super().__init__(rules, scope=self.scope)
        # By identity of the value, which is kept alive with the leaf's path.
        self._leaves = {id(v): (path, v) for path, v in zip(leaves, inputs, strict=False)}
        self._places = places
        self._found: list[dict[str, str]] = [{}]
        self._given: dict[int, list[str | None]] = {}
        self._first_module: dict[int, str] = {}
        self._renames: list[tuple[str, str]] = []
        # By identity of the transposed value, which is kept alive with its source.
        self._transposed: dict[int, tuple[Any, tuple[int, ...], Any]] = {}

    def scope(self, eqn: Equation) -> str:
        """Return an equation's scopes, copies of modules named after the modules."""
        return rename_copies(self._renamed(name_stack(eqn)), self._found[-1])

    def _renamed(self, scopes: str) -> str:
        for old, new in self._renames:
            scopes = rename_module(scopes, old, new)
        return scopes

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Value],
        ready: Mapping[Var, Value] | None = None,
    ) -> list[Value]:
        """Evaluate a program; copies of modules in it are named after the leaves it is given."""
        jaxpr = closed.jaxpr
        # The arguments inside a checkpoint or a loop are other objects than those it was given.
        given = self._given.pop(id(jaxpr), [])
        if len(given) == len(args):
            pairs = zip(given, args, strict=True)
            self._leaves.update({id(v): (path, v) for path, v in pairs if path is not None})
        leaves = {v: p for v, p in zip(jaxpr.invars, self._paths(args), strict=True) if p}
        self._found.append(self._found[-1] | find_places(jaxpr, leaves, self._places))
        try:
            return super().run(closed, args, ready)
        finally:
            self._found.pop()

    def equation(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate one equation; JAX traces a function once, so its scopes may be another's.

        A block's checkpointed method is traced in the first block and found again for the others:
        what it holds is then named after the module that calls it.
        """
        inner = eqn.params.get("jaxpr")
        if inner is None:
            return super().equation(eqn, env)
        paths = self._paths(env.operands(eqn))
        self._given[id(called_jaxpr(eqn).jaxpr)] = paths
        module = module_of(self.scope(eqn))
        first = self._first_module.setdefault(id(inner), module) if module else ""
        self._renames += [(first, module)] if module else []
        try:
            with self._owner_scope(eqn, paths):
                return super().equation(eqn, env)
        finally:
            self._renames = self._renames[: len(self._renames) - bool(module)]

    def _paths(self, values: Sequence[Any]) -> list[str | None]:
        return [self._leaves[id(v)][0] if id(v) in self._leaves else None for v in values]

    def _owner_scope(
        self, eqn: Equation, paths: Sequence[str | None]
    ) -> AbstractContextManager[Any]:
        """Return the scope of the one module whose work a checkpoint holds, if it is no other's.

        A checkpoint is one equation, which would go by the name of the module around it.
        """
        if eqn.primitive.name not in REMATS:
            return nullcontext()
        owners = self._owners(called_jaxpr(eqn).jaxpr, paths, self._found[-1])
        if len(owners) != 1 or owners & set(modules_of(self.scope(eqn))):
            return nullcontext()
        return jax.named_scope(MODULE_MARK + owners.pop())

    def _owners(
        self, jaxpr: Jaxpr, paths: Sequence[str | None], found: Mapping[str, str]
    ) -> set[str]:
        """Return the outermost modules of a program, calls without a name looked into."""
        # Kernels have more inputs than they are given values.
        leaves = {v: p for v, p in zip(jaxpr.invars, paths, strict=False) if p}
        found = {**found, **find_places(jaxpr, leaves, self._places)}
        owners: set[str] = set()
        for eqn in jaxpr.eqns:
            modules = modules_of(rename_copies(self._renamed(name_stack(eqn)), found))
            if modules:
                owners.add(modules[0])
            elif eqn.params.get("jaxpr") is not None:
                given = [None if isinstance(a, Literal) else leaves.get(a) for a in eqn.invars]
                owners |= self._owners(called_jaxpr(eqn).jaxpr, given, found)
        return owners

    def _leaf_cast(self, eqn: Equation, env: Environment) -> list[Value] | None:
        if eqn.primitive.name != "convert_element_type":
            return None
        (value,) = env.operands(eqn)
        if id(value) not in self._leaves:
            return None
        (out,) = bind(eqn, [value])
        self._leaves[id(out)] = (self._leaves[id(value)][0], out)
        return [out]

    def _transpose(self, eqn: Equation, env: Environment) -> list[Value] | None:
        if eqn.primitive.name != "transpose":
            return None
        (value,) = env.operands(eqn)
        (out,) = bind(eqn, [value])
        self._transposed[id(out)] = (value, tuple(eqn.params["permutation"]), out)
        return [out]

    def _product(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a product with a transposed operand as one with the operand itself."""
        if eqn.primitive.name != "dot_general":
            return None
        contracting, batch = map(list, eqn.params["dimension_numbers"])
        operands = env.operands(eqn)
        for side, value in enumerate(operands):
            if id(value) not in self._transposed:
                continue
            source, order, _ = self._transposed[id(value)]
            if not _keeps_order(order, contracting[side], batch[side]):
                continue
            operands[side] = source
            contracting[side] = tuple(order[d] for d in contracting[side])
            batch[side] = tuple(order[d] for d in batch[side])
        numbers = (tuple(map(tuple, contracting)), tuple(map(tuple, batch)))
        return bind(eqn.replace(params={**eqn.params, "dimension_numbers": numbers}), operands)


def _remat(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate a checkpointed function; what it only hands through is not its result."""
    if eqn.primitive.name not in REMATS:
        return None
    jaxpr = called_jaxpr(eqn).jaxpr
    given = dict(zip(jaxpr.invars, env.operands(eqn), strict=True))
    results = zip(jaxpr.outvars, enter_remat(eqn, env), strict=True)
    return [out if isinstance(v, Literal) else given.get(v, out) for v, out in results]


def _keeps_order(order: Sequence[int], contracting: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether the dims that reach the result stand in the same order without the transpose."""
    free = [order[d] for d in range(len(order)) if d not in contracting and d not in batch]
    return free == sorted(free)
