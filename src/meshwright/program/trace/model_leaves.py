"""Splitting a model into flat leaves with canonical paths, and merging it back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.config.lora_section import LoRA
from meshwright.errors import UserError
from meshwright.program.jaxpr.names import path_text
from meshwright.program.trace.adapters import Adapter, merge_adapters
from meshwright.program.trace.trained_leaves import Adapted, PathFilter, Trained, check_patterns
from meshwright.text.units import a_type

Role = Literal["param", "state"]


@dataclass(frozen=True)
class Leaf:
    """One array of a model.

    Attributes:
        path: canonical path, such as ``blocks.0.mlp.up.kernel``.
        dtype: its number format; a PRNG key for random streams.
        role: ``param`` if it is trained, ``state`` otherwise.
        variable: name of its NNX variable type, such as Param, BatchStat or RngKey.
        annotation: axis names that the model's author gave its dims, if any.
        is_weight: whether it is a parameter of the model, trained or frozen.
        original_dtype: its format in the model, if it is kept in another.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    role: Role
    variable: str
    annotation: tuple[Any, ...] | None = None
    is_weight: bool = False
    original_dtype: Any = None

    @property
    def model_dtype(self) -> Any:
        """Its format in the model."""
        return self.dtype if self.original_dtype is None else self.original_dtype

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that is not trained."""
        return self.is_weight and self.role == "state"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype for abstract evaluation."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class _Entry(NamedTuple):
    """An entry of a model's flat NNX state, which may hold several leaves."""

    path: tuple[Any, ...]
    treedef: Any
    num_leaves: int


@dataclass(frozen=True)
class ModelLeaves:
    """A model's structure and its leaves, in one fixed order.

    Attributes:
        adapters: by number of a leaf, its adapter, whose factors are the last leaves.
        left_out: paths of weights that could have an adapter and have none.
        lora: which adapters the model is to have; None for none.
        keeps_base: whether checkpoints leave out the weights that training does not change.
        evaluated: whether adapters drop nothing.
    """

    leaves: tuple[Leaf, ...]
    classes: tuple[type, ...]
    _graphdef: Any
    _entries: tuple[_Entry, ...]
    adapters: Mapping[int, Adapter] = field(default_factory=dict[int, Adapter])
    left_out: tuple[str, ...] = ()
    lora: LoRA | None = None
    keeps_base: bool = False
    evaluated: bool = False

    @property
    def base(self) -> ModelLeaves:
        """The model without adapters."""
        added = sum(2 + len(adapter.stream) for adapter in self.adapters.values())
        return replace(self, leaves=self.leaves[: len(self.leaves) - added], adapters={})

    def with_adapters(self, adapters: Mapping[int, Adapter]) -> ModelLeaves:
        """Return the same model with these adapters."""
        streams = [("RngKey", jax.eval_shape(jax.random.key, 0).dtype), ("RngCount", jnp.uint32)]
        added = list[Leaf]()
        for each in adapters.values():
            added += [
                Leaf(path, shape, jnp.dtype(jnp.float32), "param", "LoRAParam", is_weight=True)
                for path, shape in zip(each.paths, each.shapes, strict=True)
            ]
            pairs = zip(each.stream, streams, strict=False)
            added += [Leaf(path, (), dtype, "state", kind) for path, (kind, dtype) in pairs]
        return replace(self, leaves=(*self.base.leaves, *added), adapters=adapters)

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(leaf.size for leaf in self.leaves if leaf.is_weight)

    def merge(self, values: Sequence[Any]) -> Any:
        """Return a model with these leaf values; adapters are merged into the weights."""
        if self.adapters:
            values = self.merged_values(values)
        rest = iter(values)
        state = [(path, tree.unflatten(islice(rest, n))) for path, tree, n in self._entries]
        # A copy, because inside a transform NNX refuses to merge state created outside of it.
        return nnx.merge(self._graphdef, nnx.from_flat_state(state), copy=True)

    def merged_values(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the model's own leaves, with adapters merged into the weights."""
        by_path = dict(zip((leaf.path for leaf in self.leaves), values, strict=True))
        dtypes = {leaf.path: leaf.model_dtype for leaf in self.leaves}
        merged = merge_adapters(list(self.adapters.values()), by_path, dtypes)
        return [merged[leaf.path] for leaf in self.base.leaves]

    def values(self, model: Any, key: Any = None) -> list[Any]:
        """Return the leaf values of a model with this structure.

        The key draws the initial values of adapters, by default always the same.
        """
        own = self._own_values(model)
        key = jax.random.key(0) if key is None else key
        own = [
            value if leaf.dtype == leaf.model_dtype else value.astype(leaf.dtype)
            for leaf, value in zip(self.base.leaves, own, strict=True)
        ]
        return [*own, *(x for each in self.adapters.values() for x in each.initial(key))]

    def _own_values(self, model: Any) -> list[Any]:
        state = dict(_flat_state(model))
        values: list[Any] = []
        for path, _, count in self._entries:
            leaves = jax.tree.leaves(state.get(path))
            if len(leaves) != count:
                raise UserError(
                    f"`{path_text(path)}` was deleted during the call",
                    why="a model must have the same variables before and after a call",
                )
            values.extend(leaves)
        return values

    def indices(self, role: Role) -> list[int]:
        """Return the positions of the leaves with this role."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.role == role]


def split_model(model: Any, trained: Trained = nnx.Param) -> ModelLeaves:
    """Describe the leaves of a model, an NNX module or a dict of them, which may be abstract.

    An NNX filter, or adapters, says which variables are trained.
    """
    model = _without_intermediates(model)
    apart = isinstance(trained, Adapted | PathFilter)
    lora = trained.lora if isinstance(trained, Adapted) else None
    trainable = trained.also if isinstance(trained, Adapted) else trained
    is_trained: Callable[[Any, Any], bool] = nnx.filterlib.to_predicate(trainable)
    leaves: list[Leaf] = []
    entries: list[_Entry] = []
    for path, value in _flat_state(model):
        arrays, treedef = jax.tree.flatten(value)
        entries.append(_Entry(path, treedef, len(arrays)))
        has_gradient = is_trained(path, value)
        for number, array in enumerate(arrays):
            suffix = (number,) if len(arrays) > 1 else ()
            leaves.append(_describe(path + suffix, value, array, trained=has_gradient))
    counts = Counter(leaf.path for leaf in leaves)
    if twice := [path for path, count in counts.items() if count > 1]:
        raise UserError(
            f"two arrays of the model have the path `{twice[0]}`",
            why="keys of a dict that print alike, such as 0 and '0', cannot be told apart",
            fix="rename one of the keys",
        )
    if isinstance(trainable, PathFilter):
        weights = [leaf.path for leaf in leaves if leaf.is_weight]
        check_patterns("training.trainable", trainable.patterns, weights, "parameter")
    if lora is None and not any(leaf.role == "param" for leaf in leaves):
        raise UserError(
            "the model has no trainable parameters",
            why=f"none of its {len(leaves)} leaves matches the filter {trainable!r}",
            fix="pass trainable= with an NNX filter that matches what should be trained",
        )
    classes = dict.fromkeys(type(module) for _, module in nnx.iter_modules(model))
    kept = [_kept_as(leaf, lora and lora.base_dtype) for leaf in leaves]
    parts = (tuple(kept), tuple(classes), nnx.graphdef(model), tuple(entries))
    return ModelLeaves(*parts, lora=lora, keeps_base=apart)


def _kept_as(leaf: Leaf, dtype: str | None) -> Leaf:
    """Return a leaf in the format that frozen weights are kept in."""
    if dtype is None or not leaf.is_frozen or leaf.dtype != jnp.float32:
        return leaf
    return replace(leaf, dtype=jnp.dtype(dtype), original_dtype=leaf.dtype)


def _without_intermediates(model: Any) -> Any:
    if not nnx.to_flat_state(nnx.state(model, nnx.Intermediate)):
        return model
    copy = nnx.clone(model)
    nnx.pop(copy, nnx.Intermediate)
    return copy


def _flat_state(model: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Intermediate))))


def _describe(path: tuple[Any, ...], value: Any, array: Any, *, trained: bool) -> Leaf:
    if not hasattr(array, "dtype"):
        raise UserError(
            f"`{path_text(path)}` of the model is {a_type(array)}, not an array",
            why="what was assigned to it first was a module or an array, so Flax keeps it as one",
            fix="assign it once, or write nnx.static(…) around what is no array",
        )
    has_gradient = jnp.issubdtype(array.dtype, jnp.inexact)
    # Logical axis names are translated by the rules that come with them.
    names = tuple(nnx.spmd.get_var_pspec(value) or ()) if isinstance(value, nnx.Variable) else ()
    return Leaf(
        path=path_text(path),
        shape=tuple(array.shape),
        dtype=array.dtype,
        role="param" if trained and has_gradient else "state",
        variable=type(value).__name__ if isinstance(value, nnx.Variable) else "Array",
        annotation=names if any(names) else None,
        is_weight=has_gradient and (trained or isinstance(value, nnx.Param)),
    )
