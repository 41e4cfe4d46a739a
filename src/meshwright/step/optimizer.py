"""The optimizer on flat leaves: any optax transformation, its state divided like the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxprs import CALLS, ClosedJaxpr, Jaxpr, aval_of
from meshwright.program.layout import Layout, StepLeaf
from meshwright.program.parts import Leaf
from meshwright.sharding.placement import Placement, add_fsdp

_SPREADS_SCALARS = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


@dataclass(frozen=True)
class OptimizerLeaf:
    """One leaf of the optimizer's state.

    Attributes:
        path: where it is in optax's state, such as ``0.mu.blocks.0.mlp.up.kernel``.
        shape: its dims.
        dtype: its number format.
        placement: where it lives.
        param: the parameter leaf it belongs to, by number; None for counters and the like.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement
    param: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


class FlatOptimizer:
    """An optax transformation seen as a function of flat leaves.

    Optimizers that treat every element alike run on stacked leaves as they are; others (muon,
    adafactor, lamb) see each block's own matrix, so that rolling blocks changes nothing.

    Args:
        transformation: the optax optimizer.
        layout: the step's leaves.
        placements: where each parameter leaf's optimizer state lives, in the order of params.
        sizes: devices on each mesh axis.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        layout: Layout,
        placements: Sequence[Placement],
        sizes: Mapping[str, int],
    ) -> None:
        self._transformation = transformation
        self._params = layout.select("param")
        self._leaves = layout.leaves
        stacked = any(step.stacked for step in self._params)
        structs = [step.leaf.struct for step in self._params]
        self._unstack = stacked and not self._is_elementwise(structs)
        abstract = jax.eval_shape(lambda values: transformation.init(self._tree(values)), structs)
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(abstract)
        owners = self._owners(abstract)
        self.leaves = tuple(
            _describe(path, leaf, owner, placements, sizes, unstacked=self._unstack)
            for (path, leaf), owner in zip(flat, owners, strict=True)
        )

    def init(self, params: Sequence[Any]) -> list[Any]:
        """Return the optimizer's leaves for fresh parameters."""
        return jax.tree.leaves(self._transformation.init(self._tree(params)))

    def update(
        self, gradients: Sequence[Any], leaves: Sequence[Any], params: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the changed parameters and optimizer leaves."""
        tree = self._tree(params)
        state = jax.tree.unflatten(self._treedef, leaves)
        updates, state = self._transformation.update(self._tree(gradients), state, tree)
        changed: Any = optax.apply_updates(tree, updates)
        return self._flat(changed), jax.tree.leaves(state)

    def _tree(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return leaves as optax sees them: nested dicts by path."""
        tree: dict[str, Any] = {}
        for step, value in zip(self._params, values, strict=True):
            for path, piece in self._pieces(step, value):
                *folders, name = path.split(".")
                place = tree
                for folder in folders:
                    place = place.setdefault(folder, {})
                place[name] = piece
        return tree

    def _pieces(self, step: StepLeaf, value: Any) -> list[tuple[str, Any]]:
        if not (self._unstack and step.stacked):
            return [(step.leaf.path, value)]
        return [
            (self._leaves[source].path, _slice(value, number))
            for number, source in enumerate(step.sources)
        ]

    def _flat(self, tree: Mapping[str, Any]) -> list[Any]:
        values: list[Any] = []
        for step in self._params:
            if self._unstack and step.stacked:
                pieces = [_lookup(tree, self._leaves[source].path) for source in step.sources]
                values.append(jax.numpy.stack(pieces))
            else:
                values.append(_lookup(tree, step.leaf.path))
        return values

    def _owners(self, abstract: Any) -> list[int | None]:
        """Return, for each leaf of the state, the parameter it is kept for."""
        numbers = self._tree([_Number(n) for n in range(len(self._params))])
        marked = optax.tree_utils.tree_map_params(
            self._transformation,
            lambda _, number: number,
            abstract,
            numbers,
            transform_non_params=lambda _: _Number(None),
        )
        found = jax.tree.leaves(marked, is_leaf=lambda leaf: isinstance(leaf, _Number))
        return [number.value for number in found]

    def _is_elementwise(self, structs: Sequence[Any]) -> bool:
        def run(gradients: Any, params: Any) -> Any:
            state = self._transformation.init(params)
            return self._transformation.update(gradients, state, params)

        tree = {str(n): struct for n, struct in enumerate(structs)}
        return _elementwise(jax.make_jaxpr(run)(tree, tree).jaxpr)


@dataclass(frozen=True)
class _Number:
    """A parameter's number as a leaf of a tree; slicing it for a block gives it back."""

    value: int | None


def _slice(value: Any, number: int) -> Any:
    if isinstance(value, _Number):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
    return value[number]


def _lookup(tree: Mapping[str, Any], path: str) -> Any:
    found: Any = tree
    for part in path.split("."):
        found = found[part]
    return found


def _describe(
    path: Any,
    leaf: Any,
    owner: int | None,
    placements: Sequence[Placement],
    sizes: Mapping[str, int],
    *,
    unstacked: bool,
) -> OptimizerLeaf:
    text = jax.tree_util.keystr(path, simple=True, separator=".")
    whole = Placement(text, ((),) * len(leaf.shape), "kept whole")
    placement = whole
    if owner is not None:
        like = placements[owner]
        dims = like.dims[1:] if unstacked and len(like.dims) == len(leaf.shape) + 1 else like.dims
        if _fits(dims, leaf.shape, sizes):
            placement = Placement(text, dims, f"like {like.path}")
        elif sizes.get("fsdp", 1) > 1:
            own = Leaf(text, tuple(leaf.shape), leaf.dtype, "param", "optimizer")
            placement = add_fsdp(own, whole.dims, size=sizes["fsdp"], smallest=1024)
    return OptimizerLeaf(text, tuple(leaf.shape), leaf.dtype, placement, owner)


def _fits(dims: Sequence[Sequence[str]], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    if len(dims) != len(shape):
        return False
    for axes, size in zip(dims, shape, strict=True):
        parts = 1
        for axis in axes:
            parts *= sizes.get(axis, 1)
        if size % parts:
            return False
    return True


def _elementwise(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        shapes = {s for a in (*eqn.invars, *eqn.outvars) if (s := aval_of(a).shape)}
        if name in CALLS:
            inner: ClosedJaxpr = eqn.params["jaxpr"]
            if not _elementwise(inner.jaxpr):
                return False
        elif not shapes:
            continue
        elif len(shapes) > 1 or name not in ELEMENTWISE | _SPREADS_SCALARS:
            return False
    return True
