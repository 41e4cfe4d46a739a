"""Sampling from a language model with a fixed window, one compiled loop, and no cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike


def generate(
    model: nnx.Module,
    prompt: ArrayLike,
    *,
    num_tokens: int,
    context_length: int,
    temperature: float = 0.0,
    seed: int = 0,
    sharding: jax.sharding.Sharding | None = None,
) -> np.ndarray:
    """Continue a prompt with a model that maps tokens [B, T] to next-token logits [B, T, V].

    The model itself does not change: a copy in evaluation mode is run.

    Args:
        model: any causal language model.
        prompt: int [B, P], at least one token a row.
        num_tokens: number of tokens to add.
        context_length: W, the most tokens the model sees at a time.
        temperature: 0 takes the likeliest token; 1 samples from the model's distribution.
        seed: seed of the samples.
        sharding: sharding of the new tokens; must be replicated if several processes call this.

    Returns:
        int32 [B, P + num_tokens], the prompt and its continuation.
    """
    tokens = np.asarray(prompt, dtype=np.int32)
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(f"A prompt is [rows, at least one token], but has shape {tokens.shape}.")
    # No longer than needed: models may see 131,072 tokens, and each step runs the whole window.
    length = min(context_length, tokens.shape[1] + num_tokens)
    recent = tokens[:, -length:]
    window = np.pad(recent, ((0, 0), (0, length - recent.shape[1])))
    graphdef, state = nnx.split(model)
    new = _continue(
        graphdef,
        state,
        window,
        recent.shape[1],
        jax.random.key(seed),
        np.float32(temperature),
        num_tokens=num_tokens,
        sharding=sharding,
    )
    return np.concatenate([tokens, np.asarray(new)], axis=1)


@partial(jax.jit, static_argnums=0, static_argnames=("num_tokens", "sharding"))
def _continue(
    graphdef: nnx.GraphDef[nnx.Module],
    state: nnx.State[Any, Any],
    window: Array,
    filled: Array,
    key: Array,
    temperature: Array,
    *,
    num_tokens: int,
    sharding: jax.sharding.Sharding | None,
) -> Array:
    """Return the `num_tokens` tokens [B, N] that follow the `filled` first ones of `window`."""

    def step(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        window, filled = carry
        # A copy per step, because a call may change the model, such as counters of random streams.
        model = nnx.merge(graphdef, state, copy=True)
        model.eval()
        logits = jnp.take(model(window), filled - 1, axis=1)
        token = _choose(logits, key, temperature)
        return _append(window, filled, token), token

    _, tokens = jax.lax.scan(step, (window, filled), jax.random.split(key, num_tokens))
    return tokens.T if sharding is None else jax.lax.with_sharding_constraint(tokens.T, sharding)


def _choose(logits: Array, key: Array, temperature: Array) -> Array:
    """Pick one token [B] from logits [B, V]: the likeliest at temperature zero, else a sample."""
    greedy = temperature == 0
    sample = jax.random.categorical(key, logits / jnp.where(greedy, 1, temperature))
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), sample).astype(jnp.int32)


def _append(window: Array, filled: Array, token: Array) -> tuple[Array, Array]:
    """Append a token [B] to the filled part; a full window first drops its oldest token."""
    length = window.shape[1]
    window = jnp.where(filled == length, jnp.roll(window, -1, axis=1), window)
    at = jnp.minimum(filled, length - 1)
    return window.at[:, at].set(token), jnp.minimum(filled + 1, length)
