"""The traced program in normal form: calls inlined, transposes folded into products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshwright.program.interpret import Interpreter
from meshwright.program.jaxprs import ClosedJaxpr, Equation, aval_of, bind, name_stack
from meshwright.program.names import module_of, rename_module


def normalize(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program without calls, so that each equation stands in one place only.

    A product with a transposed weight (tied embeddings) becomes a product with the weight itself,
    whose gradient then has the weight's own shape: the partial gradients of several uses can be
    added before they are reduced over the mesh.
    """
    inputs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _Normal().run(closed, args))(*inputs)


class _Normal(Interpreter):
    def __init__(self) -> None:
        self._first_module: dict[int, str] = {}
        self._renames: list[tuple[str, str]] = []
        # By identity of the transposed value, which is kept alive with its source.
        self._transposed: dict[int, tuple[Any, tuple[int, ...], Any]] = {}

    def scope(self, eqn: Equation) -> str:
        scopes = name_stack(eqn)
        for old, new in self._renames:
            scopes = rename_module(scopes, old, new)
        return scopes

    def equation(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate one equation; JAX traces a function once, so its scopes may be another's.

        A block's checkpointed method is traced in the first block and found again for the others:
        what it holds is then named after the module that calls it.
        """
        inner = eqn.params.get("jaxpr")
        module = module_of(self.scope(eqn))
        if inner is None or not module:
            return super().equation(eqn, args)
        first = self._first_module.setdefault(id(inner), module)
        self._renames.append((first, module))
        try:
            return super().equation(eqn, args)
        finally:
            self._renames.pop()

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        if eqn.primitive.name == "transpose":
            (out,) = bind(eqn, args)
            self._transposed[id(out)] = (args[0], tuple(eqn.params["permutation"]), out)
            return [out]
        if eqn.primitive.name == "dot_general":
            return self._product(eqn, args)
        return bind(eqn, args)

    def _product(self, eqn: Equation, args: list[Any]) -> list[Any]:
        contracting, batch = eqn.params["dimension_numbers"]
        contracting, batch = list(contracting), list(batch)
        operands = list(args)
        for side, value in enumerate(args):
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


def _keeps_order(order: Sequence[int], contracting: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether the dims that reach the result stand in the same order without the transpose."""
    free = [order[d] for d in range(len(order)) if d not in contracting and d not in batch]
    return free == sorted(free)
