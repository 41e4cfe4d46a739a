"""Decoders: how the next token's logits are computed, from what earlier tokens left or anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
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


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model as a function of its weights; the parts are found once, as Flax takes long for it.

    Attributes:
        name: the name of its class.
        graphdef: its structure.
        tree: how its weights are arranged.
        weights: the values of its variables.
        compute_dtype: what modules exchange instead of float32, as in training, where weights are
            cast to it; None for what the model says. The logits are float32 then.
    """

    name: str
    graphdef: Any
    tree: Any
    weights: list[Array]
    compute_dtype: Any = None

    def logits_of(self, weights: Weights, tokens: Array) -> Array:
        """Return the logits [B, T, V] of tokens [B, T], in evaluation mode."""
        # A copy per call, because a call may change the model, such as counters of random streams.
        state = jax.tree.unflatten(self.tree, list(weights))
        copied = nnx.merge(self.graphdef, state, copy=True)
        copied.eval()
        follow_policy(copied, self.compute_dtype)
        with module_scopes(copied, self.compute_dtype):
            return copied(tokens)

    @cached_property
    def key(self) -> ModelKey | None:
        """What models of the same program have in common; None if that cannot be told."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in self.weights)
        whole = self.graphdef, shapes, self.compute_dtype, jax.config.values["jax_enable_x64"]
        try:
            key = ModelKey(whole, hash(whole))
        except TypeError:
            # A model with attributes that have no hash.
            return None
        # The same object for models alike: comparing them takes as long.
        found = _keys.pop(key, key)
        _keys[found] = found
        while len(_keys) > KEPT:
            _keys.popitem(last=False)
        return found


class ModelKey(NamedTuple):
    """What decides a model's program, and its hash, which takes long to compute."""

    whole: Any
    hashed: int

    def __hash__(self) -> int:
        return self.hashed


_keys: OrderedDict[ModelKey, ModelKey] = OrderedDict()


def split_model(model: nnx.Module, compute_dtype: Any = None) -> SplitModel:
    """Take a model apart."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return SplitModel(type(model).__name__, graphdef, tree, leaves, compute_dtype)


def remembered(kept: OrderedDict[Any, Kept], model: SplitModel, more: Any, make: Any) -> Kept:
    """Return what was made for a model of the same program, or make it.

    Args:
        kept: what was made, the last used last.
        model: the model.
        more: what else it depends on.
        make: makes it.
    """
    if model.key is None:
        return make()
    key = model.key, more
    found = kept.pop(key, None)
    kept[key] = found = make() if found is None else found
    while len(kept) > KEPT:
        kept.popitem(last=False)
    return found
