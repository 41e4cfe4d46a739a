"""A sample of text from a trained language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.data.tokenizer import Tokens
from meshwright.models.generate import generate
from meshwright.recipe import Recipe
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.tasks.language_modeling import LanguageModeling

PROMPT_TOKENS = 16
TEMPERATURE = 0.8
"""Below 1, because a model after a short training is too random otherwise."""


@activity("generating a sample of text")
def generate_sample(
    recipe: Recipe,
    assembled: Assembled,
    state: TrainState,
    *,
    num_tokens: int,
    ends: Sequence[int] = (),
) -> str | None:
    """Continue the beginning of a held-out text; None if the model does not generate text.

    Args:
        recipe: the objects of the run.
        assembled: the step.
        state: its state.
        num_tokens: number of tokens to add.
        ends: tokens that end the text.
    """
    tokenizer: Any = recipe.data.tokenizer
    if not num_tokens or tokenizer is None or not isinstance(recipe.task, LanguageModeling):
        return None
    source = recipe.eval_data or recipe.data
    batch = source.batch(0, 1)
    row = np.asarray(batch["tokens"] if "tokens" in batch else batch["inputs"])[0]
    prompt = row[None, : min(PROMPT_TOKENS, recipe.task.context_length - 1)]
    tokens = generate(
        assembled.model(state),
        prompt,
        num_tokens=num_tokens,
        context_length=recipe.task.context_length,
        temperature=TEMPERATURE,
        sharding=NamedSharding(assembled.mesh, PartitionSpec()),
    )
    # The model's vocabulary may be larger than the tokenizer's.
    text = until_end(tokens[0], prompt.shape[1], ends)
    known = text[text < tokenizer.vocab_size]
    return _printable(str(tokenizer.decode(known)))


def until_end(tokens: Tokens, start: int, ends: Sequence[int]) -> Tokens:
    """Return tokens up to the first from `start` on that ends a text."""
    found = np.flatnonzero(np.isin(tokens[start:], ends))
    return tokens[: start + int(found[0])] if found.size else tokens


def _printable(text: str) -> str:
    """Return text without control characters, which would affect a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
