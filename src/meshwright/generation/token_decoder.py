"""Decoders: how the next token's logits are computed, from what earlier tokens left or anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

LATER, COUNT = "sees later tokens", "depends on how many tokens there are"
"""What a model may do that decoders do not."""
Weights = Sequence[Array]
"""The values of a model's variables, in a decoder's order."""
Cache = Any
"""What a decoder keeps of earlier tokens: a tree of arrays, dim 0 of each being the row."""
Source = tuple[Any, ...]
"""What the model reads besides tokens, such as the text that it translates: one array, or none."""


@dataclass(frozen=True, eq=False)
class LogitsOf:
    """A model in evaluation mode, from weights, source and tokens [B, T] to logits [B, T, V].

    Attributes:
        parts: its structure.
        tree: that of its weights.
        source: the shapes of what one row has besides its tokens.
    """

    parts: Any
    tree: Any
    source: Source = ()

    def __call__(self, weights: Weights, tokens: Array) -> Array:
        """Return logits; the source comes after the weights."""
        own = len(weights) - len(self.source)
        # A copy per call, because a call may change the model, such as counters of random streams.
        values = jax.tree.unflatten(self.tree, list(weights[:own]))
        copied = nnx.merge(self.parts, values, copy=True)
        copied.eval()
        return copied(*weights[own:], tokens)


class TokenDecoder(Protocol):
    """Computes the logits of the next token; both methods can be traced.

    Attributes:
        length: the most tokens of a row, prompt and continuation together.
        reason: why nothing is kept of earlier tokens; empty if their keys, values and states are.
        sees: what the logits of a row depend on besides its earlier tokens; if anything, rows have
            no padding, and all of a call have the same length.
    """

    length: int
    reason: str
    sees: str

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts.

        Args:
            weights: the values of the model's variables.
            tokens: int32 [B, P], each row padded at its end.
            lengths: int32 [B], the tokens of each row without padding, at least one.
            source: what each row has besides its tokens, [B, …].

        Returns:
            The logits [B, V] of the token after each prompt, and the cache.
        """
        ...

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row.

        Args:
            weights: the values of the model's variables.
            cache: from the last call.
            tokens: int32 [B].
            positions: int32 [B], where they stand in their rows.

        Returns:
            The logits [B, V] of the token after them, and the cache.
        """
        ...


@dataclass
class RecomputingDecoder:
    """Runs the model on all earlier tokens again for every new one.

    If more than earlier tokens counts, rows are not padded, and each length has its own program.

    Attributes:
        logits_of: the model.
        length: the most tokens of a row.
        reason: why nothing is kept.
        sees: what the logits depend on besides earlier tokens.
    """

    logits_of: LogitsOf
    length: int
    reason: str
    sees: str = ""

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts; see `TokenDecoder`."""
        room = 0 if self.sees else self.length - tokens.shape[1]
        window = jnp.pad(tokens, ((0, 0), (0, room)))
        return self._logits(weights, window, lengths - 1, source), (window, source)

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row; see `TokenDecoder`."""
        window, source = cache
        window = (
            jnp.concatenate([window, tokens[:, None]], axis=1)
            if self.sees
            else window.at[jnp.arange(tokens.shape[0]), positions].set(tokens)
        )
        return self._logits(weights, window, positions, source), (window, source)

    def try_out(self, weights: Weights, vocabulary: int) -> str:
        """Return what else than earlier tokens changes a row's logits: then padding is wrong.

        Nothing can be tried out without values.
        """
        if any(isinstance(weight, jax.ShapeDtypeStruct) for weight in weights):
            return ""
        random = np.random.default_rng(0)
        row = random.integers(0, vocabulary, (1, self.length), np.int32)
        logits_of = jax.jit(self.logits_of)
        weights = [*weights, *(jnp.ones(s.shape, s.dtype) for s in self.logits_of.source)]
        logits = logits_of(weights, row)
        scale, eps = jnp.abs(logits).max(), float(jnp.finfo(logits.dtype).eps)
        half = self.length // 2
        # Some in a row, because a chunk may see no further than its end.
        cuts = {*range(half, half + 8), *random.integers(1, self.length, 16).tolist()}
        for count in sorted(cut for cut in cuts if 0 < cut < self.length):
            other = random.integers(0, vocabulary, row.shape, np.int32)
            other[:, :count] = row[:, :count]
            change = jnp.abs(logits_of(weights, other) - logits)[:, :count]
            if bool((change > 16 * eps * scale).any()):
                return LATER
        try:
            alone = logits_of(weights, row[:, : half + 1])
        except Exception:
            # Some models take only some lengths; then the rows of this one have to do.
            return ""
        # Sums of another length are rounded otherwise.
        near = min(0.03, 1000 * eps) * scale
        changed = jnp.abs(logits[:, : half + 1] - alone) > near
        return COUNT if bool(changed.any()) else ""

    def _logits(self, weights: Weights, window: Array, positions: Array, source: Source) -> Array:
        # Row by row as far as the model can tell: some mix the rows of a batch.
        def one(row: Array, source: Source) -> Array:
            return self.logits_of(with_source(weights, source), row[None])[0]

        logits = jax.vmap(one)(window, source)
        return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


def split_model(model: nnx.Module, source: Source = ()) -> tuple[LogitsOf, list[Array]]:
    """Return a model in evaluation mode as a function of its weights, and the weights."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    rows = tuple(jax.ShapeDtypeStruct((1, *s.shape[1:]), s.dtype) for s in source)
    return LogitsOf(graphdef, tree, rows), leaves


def with_source(weights: Weights, source: Source) -> list[Array]:
    """Return what `LogitsOf` takes for one row."""
    return [*weights, *(each[None] for each in source)]
