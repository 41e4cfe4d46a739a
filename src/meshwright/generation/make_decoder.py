"""The decoder of a model: with a cache where its program allows one, else by recomputing."""

from __future__ import annotations

from typing import Any

from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental
from meshwright.generation.token_decoder import RecomputingDecoder, SplitModel, TokenDecoder
from meshwright.generation.traced_decoder import TracedDecoder


def make_decoder(
    model: SplitModel, length: int, *, divided: bool = False, kernel: str = ""
) -> TokenDecoder:
    """Return a model's decoder.

    Args:
        model: maps tokens [B, T] to logits [B, T, V]; each token sees only earlier ones.
        length: the most tokens of a row, prompt and continuation together.
        divided: whether devices have parts of weights.
        kernel: what computes attention over whole prompts; empty for the model's own operations.
    """
    how: Any = {"divided": divided, "kernel": kernel}
    try:
        traced = TracedDecoder(model.logits_of, model.weights, length, **how)
        return IncrementalDecoder(traced, length)
    except NotIncremental as reason:
        return RecomputingDecoder(model.logits_of, length, str(reason))
