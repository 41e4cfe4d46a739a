"""The traced program in normal form: calls inlined, transposes folded into products."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from meshwright.program.dims.op import free_dims
from meshwright.program.evaluate.evaluator import Environment, Evaluator, enter_remat
from meshwright.program.jaxpr.equations import (
    REMATS,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Value,
    bind,
    called_jaxpr,
    name_stack,
    structs_of,
)
from meshwright.program.jaxpr.names import MODULE_MARK, module_of, modules_of, rename_module
from meshwright.program.trace.requested_layouts import record_constraint
from meshwright.program.trace.scopes import PathsByClass, find_originals, rename_copies


def normalize(
    closed: ClosedJaxpr, leaves: Sequence[str] = (), paths_by_class: PathsByClass | None = None
) -> ClosedJaxpr:
    """Return the same program with calls inlined, so that each equation runs in one place only.

    The first inputs are the model's leaves, with these paths. The paths of its modules of each
    class are there to rename copies of them.

    A product with a transposed weight (tied embeddings) becomes a product with the weight itself.
    Its gradient then has the weight's shape, and the partial gradients of several uses can be added
    before they are reduced over the mesh.
    """
    run = lambda *args: _Normalizer(leaves, args, paths_by_class or {}).run(closed, args)  # noqa: E731
    return jax.make_jaxpr(run)(*structs_of(closed.jaxpr.invars))


class _Normalizer(Evaluator):
    """Evaluates a program into its normal form."""

    def __init__(
        self, leaves: Sequence[str], inputs: Sequence[Any], paths_by_class: PathsByClass
    ) -> None:
        rules = (_remat, record_constraint, self._leaf_cast, self._transpose, self._product)
        super().__init__(rules, scope=self.scope)
        # By id of the value, which is stored as well so that no other object gets that id.
        self._leaves = {id(v): (path, v) for path, v in zip(leaves, inputs, strict=False)}
        self._paths_by_class = paths_by_class
        # A stack: by provisional path of a copy, the path of its module.
        self._originals: list[dict[str, str]] = [{}]
        # By id of a nested jaxpr, the paths of the leaves it is called with.
        self._argument_paths: dict[int, list[str | None]] = {}
        self._first_module: dict[int, str] = {}
        self._renames: list[tuple[str, str]] = []
        # By id of the transposed value, which is stored as well for the same reason.
        self._transposed: dict[int, tuple[Any, tuple[int, ...], Any]] = {}

    def scope(self, eqn: Equation) -> str:
        """Return an equation's scopes, in which copies of modules have the modules' paths."""
        return rename_copies(self._renamed(name_stack(eqn)), self._originals[-1])

    def _renamed(self, scopes: str) -> str:
        for old, new in self._renames:
            scopes = rename_module(scopes, old, new)
        return scopes

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluate a program; the leaves it reads show which modules the copies in it are."""
        jaxpr = closed.jaxpr
        # Inside a checkpoint or a loop, arguments are other objects than those it is called with.
        known_paths = self._argument_paths.pop(id(jaxpr), [])
        if len(known_paths) == len(args):
            pairs = zip(known_paths, args, strict=True)
            self._leaves.update({id(v): (path, v) for path, v in pairs if path is not None})
        leaves = {v: p for v, p in zip(jaxpr.invars, self._paths(args), strict=True) if p}
        self._originals.append(
            self._originals[-1] | find_originals(jaxpr, leaves, self._paths_by_class)
        )
        try:
            return super().run(closed, args)
        finally:
            self._originals.pop()

    def equation(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate one equation, with the scopes of the module that calls it.

        JAX traces a block's checkpointed method once, in the first block, and reuses the jaxpr for
        the others: its equations have the first block's scopes and are renamed here.
        """
        inner = eqn.params.get("jaxpr")
        if inner is None:
            return super().equation(eqn, env)
        paths = self._paths(env.operands(eqn))
        self._argument_paths[id(called_jaxpr(eqn).jaxpr)] = paths
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
        """Return the scope of the module inside a checkpoint, if there is exactly one.

        A checkpoint is one equation, which would otherwise have the scope of the module around it.
        Of several modules, such as a block and the dropout that all blocks share, it is the only
        one that is an element of a list.
        """
        if eqn.primitive.name not in REMATS:
            return nullcontext()
        owners = self._owners(called_jaxpr(eqn).jaxpr, paths, self._originals[-1])
        if owners & set(modules_of(self.scope(eqn))):
            return nullcontext()
        if len(owners) > 1:
            owners = {path for path in owners if path[-1].isdigit()}
        return jax.named_scope(MODULE_MARK + owners.pop()) if len(owners) == 1 else nullcontext()

    def _owners(
        self, jaxpr: Jaxpr, paths: Sequence[str | None], originals: Mapping[str, str]
    ) -> set[str]:
        """Return the outermost modules of a program, and of calls that belong to no module."""
        # Kernels have more inputs than operands.
        leaves = {v: p for v, p in zip(jaxpr.invars, paths, strict=False) if p}
        originals = {**originals, **find_originals(jaxpr, leaves, self._paths_by_class)}
        owners: set[str] = set()
        for eqn in jaxpr.eqns:
            modules = modules_of(rename_copies(self._renamed(name_stack(eqn)), originals))
            if modules:
                owners.add(modules[0])
            elif eqn.params.get("jaxpr") is not None:
                inner = [None if isinstance(a, Literal) else leaves.get(a) for a in eqn.invars]
                owners |= self._owners(called_jaxpr(eqn).jaxpr, inner, originals)
        return owners

    def _leaf_cast(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Cast a leaf, and remember that the result is that leaf."""
        if eqn.primitive.name != "convert_element_type":
            return None
        (value,) = env.operands(eqn)
        if id(value) not in self._leaves:
            return None
        (out,) = bind(eqn, [value])
        self._leaves[id(out)] = (self._leaves[id(value)][0], out)
        return [out]

    def _transpose(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Transpose a value, and remember what it was before."""
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
            # Without the transpose, dims that are not summed must come in the same order.
            free = [order[d] for d in free_dims(eqn, side)]
            if free != sorted(free):
                continue
            operands[side] = source
            contracting[side] = tuple(order[d] for d in contracting[side])
            batch[side] = tuple(order[d] for d in batch[side])
        numbers = (tuple(map(tuple, contracting)), tuple(map(tuple, batch)))
        return bind(eqn.replace(params={**eqn.params, "dimension_numbers": numbers}), operands)


def _remat(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate a checkpointed function; arguments it returns unchanged stay the same values."""
    if eqn.primitive.name not in REMATS:
        return None
    jaxpr = called_jaxpr(eqn).jaxpr
    arguments = dict(zip(jaxpr.invars, env.operands(eqn), strict=True))
    results = zip(jaxpr.outvars, enter_remat(eqn, env), strict=True)
    return [out if isinstance(v, Literal) else arguments.get(v, out) for v, out in results]
