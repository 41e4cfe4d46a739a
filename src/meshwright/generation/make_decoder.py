"""The decoder of a model: with a cache where its program allows one, else by recomputing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from meshwright.errors import UserError, typed_line
from meshwright.generation.chunked import chunk_sizes, chunked_decoder
from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental
from meshwright.generation.token_decoder import (
    LogitsOf,
    RecomputingDecoder,
    Source,
    TokenDecoder,
    Weights,
    split_model,
)
from meshwright.generation.traced_decoder import OtherOperations, TracedDecoder
from meshwright.program.trace.scopes import module_scopes


def make_decoder(
    model: nnx.Module, length: int, source: Source = ()
) -> tuple[TokenDecoder, list[Array]]:
    """Return a model's decoder, and its weights in the decoder's order.

    Args:
        model: maps tokens [B, T] to logits [B, T, V].
        length: the most tokens of a row, prompt and continuation together.
        source: what rows have besides tokens, as arrays [B, …] or their shapes.
    """
    logits_of, weights = split_model(model, source)
    try:
        with module_scopes(model):
            return cached_decoder(logits_of, weights, length), weights
    except NotIncremental as reason:
        found = RecomputingDecoder(logits_of, length, str(reason))
        seen = found.try_out(weights, _logits(logits_of, weights, length).shape[-1])
        if not seen:
            return found, weights
        said = str(NotIncremental(f"the model {seen}", reason.at))
        try:
            _logits(logits_of, weights, length - 1)
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} cannot continue a text",
                why=f"{said}, so rows cannot be padded; with {length - 1:,} tokens alone it raises "
                f"{typed_line(error)}",
                fix="mask later positions in the model, or let it take any number of tokens",
            ) from error
        return RecomputingDecoder(logits_of, length, said, seen), weights


def _logits(logits_of: LogitsOf, weights: Weights, length: int) -> Any:
    tokens = jax.ShapeDtypeStruct((1, length), np.dtype(np.int32))
    return jax.eval_shape(logits_of, [*weights, *logits_of.source], tokens)


def cached_decoder(logits_of: LogitsOf, weights: Weights, length: int) -> IncrementalDecoder:
    """Return a decoder with a cache; raises `NotIncremental` if there is none."""
    try:
        return IncrementalDecoder(TracedDecoder(logits_of, weights, length), length)
    except OtherOperations:
        # A table as long as the row is not sliced. The last token of a row is never read.
        return IncrementalDecoder(TracedDecoder(logits_of, weights, length - 1), length - 1)
    except NotIncremental as reason:
        for chunk in chunk_sizes(logits_of, weights, length):
            with suppress(NotIncremental):
                return chunked_decoder(logits_of, weights, length, chunk)
        raise reason


def how_decoded(decoder: TokenDecoder) -> str:
    """Return in one line how the next token is computed."""
    if not decoder.reason:
        return "cached: each new token is read once"
    each = ", in a program of its own for each length" if decoder.sees else ""
    return f"recomputed: every new token reads all earlier ones again{each}: {decoder.reason}"
