"""The decoder of a model: with a cache where its program allows one, else by recomputing."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import Array

from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental
from meshwright.generation.token_decoder import RecomputingDecoder, TokenDecoder, split_model
from meshwright.generation.traced_decoder import TracedDecoder


def make_decoder(
    model: nnx.Module, length: int, *, compute_dtype: Any = None, join_weights: bool = True
) -> tuple[TokenDecoder, list[Array]]:
    """Return a model's decoder, and its weights in the decoder's order.

    Args:
        model: maps tokens [B, T] to logits [B, T, V]; each token sees only earlier ones.
        length: the most tokens of a row, prompt and continuation together.
        compute_dtype: what modules exchange instead of float32; None for what the model says.
        join_weights: whether weights of one input may be concatenated.
    """
    logits_of, weights = split_model(model, compute_dtype)
    try:
        traced = TracedDecoder(logits_of, weights, length, join_weights=join_weights)
        return IncrementalDecoder(traced, length), weights
    except NotIncremental as reason:
        return RecomputingDecoder(logits_of, length, str(reason)), weights
