"""The decoder of a model: with a cache where its program allows one, else by recomputing."""

from __future__ import annotations

from flax import nnx
from jax import Array

from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental
from meshwright.generation.token_decoder import RecomputingDecoder, TokenDecoder, split_model
from meshwright.generation.traced_decoder import TracedDecoder
from meshwright.program.trace.scopes import module_scopes


def make_decoder(model: nnx.Module, length: int) -> tuple[TokenDecoder, list[Array]]:
    """Return a model's decoder, and its weights in the decoder's order.

    Args:
        model: maps tokens [B, T] to logits [B, T, V]; each token sees only earlier ones.
        length: the most tokens of a row, prompt and continuation together.
    """
    logits_of, weights = split_model(model)
    try:
        with module_scopes(model):
            decoder = IncrementalDecoder(TracedDecoder(logits_of, weights, length), length)
        return decoder, weights
    except NotIncremental as reason:
        return RecomputingDecoder(logits_of, length, str(reason)), weights
