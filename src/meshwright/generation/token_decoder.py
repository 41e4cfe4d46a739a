"""Decoders: how the next token's logits are computed, from what earlier tokens left or anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from meshwright.program.trace.precision_policy import follow_policy
from meshwright.program.trace.scopes import module_scopes

Weights = Sequence[Array]
"""The values of a model's variables, in a decoder's order."""
Cache = Any
"""What a decoder keeps of earlier tokens: a tree of arrays, dim 0 of each being the row."""
LogitsOf = Callable[[Weights, Array], Array]
"""From weights and tokens [B, T] to logits [B, T, V]."""


Kept = TypeVar("Kept")
KEPT = 8
"""Models and lengths of which something is kept."""


class TokenDecoder(Protocol):
    """Computes the logits of the next token; `start` and `step` can be traced.

    Attributes:
        length: the most tokens of a row, prompt and continuation together.
        reason: why nothing is kept of earlier tokens; empty if their keys, values and states are.
    """

    @property
    def length(self) -> int:
        """The most tokens of a row."""
        ...

    @property
    def reason(self) -> str:
        """Why nothing is kept."""
        ...

    def prepare(self, weights: Weights) -> Weights:
        """Return what the other methods take as weights, from the values of the variables."""
        ...

    def start(self, weights: Weights, tokens: Array, lengths: Array) -> tuple[Array, Cache]:
        """Read the prompts.

        Args:
            weights: from `prepare`.
            tokens: int32 [B, P], each row padded at its end.
            lengths: int32 [B], the tokens of each row without padding, at least one.

        Returns:
            The logits [B, V] of the token after each prompt, and the cache.
        """
        ...

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row.

        Args:
            weights: from `prepare`.
            cache: from the last call.
            tokens: int32 [B].
            positions: int32 [B], where they stand in their rows.

        Returns:
            The logits [B, V] of the token after them, and the cache.
        """
        ...


@dataclass(frozen=True)
class RecomputingDecoder:
    """Runs the model on all earlier tokens again for every new one.

    Attributes:
        logits_of: the model.
        length: the most tokens of a row.
        reason: why nothing is kept.
    """

    logits_of: LogitsOf
    length: int
    reason: str

    def prepare(self, weights: Weights) -> Weights:
        """Return the weights; see `TokenDecoder`."""
        return weights

    def start(self, weights: Weights, tokens: Array, lengths: Array) -> tuple[Array, Cache]:
        """Read the prompts; see `TokenDecoder`."""
        room = self.length - tokens.shape[1]
        window = jnp.pad(tokens, ((0, 0), (0, room)))
        return self._logits(weights, window, lengths - 1), window

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row; see `TokenDecoder`."""
        window = cache.at[jnp.arange(tokens.shape[0]), positions].set(tokens)
        return self._logits(weights, window, positions), window

    def sees_padding(self, weights: Weights) -> bool:
        """Whether tokens after a row change its logits, or their number does: then it is wrong."""
        count = max(1, self.length // 2)
        row = jnp.arange(self.length, dtype=jnp.int32)[None] % 7
        padded = [row.at[:, count:].set(filler) for filler in (0, 1)]
        logits_of = jax.jit(self.logits_of)
        found = [logits_of(weights, tokens)[:, :count] for tokens in padded]
        try:
            found.append(logits_of(weights, row[:, :count]))
        except Exception:
            # Some models take only some lengths; then the two rows have to do.
            return not bool(jnp.allclose(found[0], found[1], rtol=1e-2, atol=1e-2))
        return not all(bool(jnp.allclose(found[0], f, rtol=1e-2, atol=1e-2)) for f in found[1:])

    def _logits(self, weights: Weights, window: Array, positions: Array) -> Array:
        # Row by row as far as the model can tell: some mix the rows of a batch.
        logits = jax.vmap(lambda row: self.logits_of(weights, row[None])[0])(window)
        return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


class ModelStructure:
    """What models of one program share; the same object for models alike.

    Attributes:
        name: the name of the model's class.
        graphdef: its structure.
        tree: how its weights are arranged.
    """

    def __init__(self, model: nnx.Module, graphdef: Any, tree: Any) -> None:
        self.name, self.graphdef, self.tree = type(model).__name__, graphdef, tree


@dataclass(frozen=True)
class SplitModel:
    """A model as a function of its weights.

    Attributes:
        structure: all but the weights.
        weights: the values of its variables.
        compute_dtype: what modules exchange instead of float32, as in training, where weights are
            cast to it; None for what the model says. The logits are float32 then.
    """

    structure: ModelStructure
    weights: list[Any]
    compute_dtype: Any = None

    def logits_of(self, weights: Weights, tokens: Array) -> Array:
        """Return the logits [B, T, V] of tokens [B, T], in evaluation mode."""
        # A copy per call, because a call may change the model, such as counters of random streams.
        state = jax.tree.unflatten(self.structure.tree, list(weights))
        copied = nnx.merge(self.structure.graphdef, state, copy=True)
        copied.eval()
        follow_policy(copied, self.compute_dtype)
        with module_scopes(copied, self.compute_dtype):
            return copied(tokens)


class _Seen(NamedTuple):
    """A model that was taken apart: its attributes then, and its variables in their order."""

    structure: ModelStructure
    attributes: list[tuple[dict[str, Any], list[Any]]]
    variables: list[nnx.Variable[Any]]

    @property
    def unchanged(self) -> bool:
        """Whether the model has the same parts still; Flax would take long to tell."""
        return all(
            len(now) == len(then) and all(map(is_, now.values(), then))
            for now, then in self.attributes
        )


_seen: WeakKeyDictionary[nnx.Module, _Seen] = WeakKeyDictionary()
_structures: OrderedDict[Any, ModelStructure] = OrderedDict()


def split_model(model: nnx.Module, compute_dtype: Any = None) -> SplitModel:
    """Take a model apart."""
    seen = _seen.get(model)
    if seen is not None and seen.unchanged:
        weights = [variable.get_raw_value() for variable in seen.variables]
        return SplitModel(seen.structure, weights, compute_dtype)
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    structure = ModelStructure(model, graphdef, tree)
    try:
        structure = _structures.pop(graphdef, structure)
        _structures[graphdef] = structure
    except TypeError:
        # A model with attributes that have no hash.
        return SplitModel(structure, leaves, compute_dtype)
    while len(_structures) > KEPT:
        _structures.popitem(last=False)
    attributes: list[tuple[dict[str, Any], list[Any]]] = []
    found: dict[int, Any] = {}
    if _walk(model, attributes, found) and all(id(leaf) in found for leaf in leaves):
        _seen[model] = _Seen(structure, attributes, [found[id(leaf)] for leaf in leaves])
    return SplitModel(structure, leaves, compute_dtype)


def _walk(part: Any, attributes: list[Any], found: dict[int, Any]) -> bool:
    """Note the attributes of modules and the variables; return whether nothing else can change."""
    attributes.append((vars(part), [*vars(part).values()]))
    for name, value in vars(part).items():
        if isinstance(value, nnx.Variable):
            # Several variables with one array may have different ones later.
            if found.setdefault(id(value.get_raw_value()), value) is not value:
                return False
        elif name.startswith("_pytree__"):
            continue
        elif isinstance(value, nnx.Pytree):
            if not _walk(value, attributes, found):
                return False
        elif isinstance(value, list | dict | set | np.ndarray | jax.Array):
            return False
    return True


def remembered(kept: OrderedDict[Any, Kept], model: SplitModel, more: Any, make: Any) -> Kept:
    """Return what was made for a model of the same program, or make it.

    Args:
        kept: what was made, the last used last.
        model: the model.
        more: what else it depends on.
        make: makes it.
    """
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in model.weights)
    key = (model.structure, shapes, model.compute_dtype, more, jax.config.values["jax_enable_x64"])
    found = kept.pop(key, None)
    kept[key] = found = make() if found is None else found
    while len(kept) > KEPT:
        kept.popitem(last=False)
    return found
