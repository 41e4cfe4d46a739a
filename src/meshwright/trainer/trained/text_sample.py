"""A sample of text from a trained language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.sentences import grade
from meshwright.data.tokenizer import FileTokenizer
from meshwright.generation.generate import generate
from meshwright.generation.text_settings import TextTokens, printable
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.tasks.language_modeling import LanguageModeling
from meshwright.trainer.fit_settings import FitSettings

PROMPT_TOKENS = 16
TEMPERATURE = 0.8
"""Below 1, because a model is too random after a short run."""
GRADED_ROWS = 8
"""Texts of the built-in sentences are graded; one alone would say little."""


class TextSample(NamedTuple):
    """A held-out text as the model continues it, and how good that is, if it can be said."""

    text: str
    grade: str | None


@activity("generating a sample of text")
def generate_sample(
    asked: FitSettings, assembled: Assembled, state: TrainState, ends: Sequence[int] = ()
) -> TextSample | None:
    """Continue the beginning of a held-out text; None if the model does not generate text."""
    task = None if asked.recipe is None else asked.recipe.task
    source = asked.eval_data or asked.data
    tokenizer: Any = None if asked.data is None else asked.data.tokenizer
    if not asked.sample_tokens or tokenizer is None or not isinstance(task, LanguageModeling):
        return None
    assert source is not None
    assert asked.recipe is not None
    graded = asked.recipe.config_data.is_built_in_text
    batch = source.batch(0, GRADED_ROWS if graded else 1)
    rows = np.asarray(batch["tokens"] if "tokens" in batch else batch["inputs"])
    prompts: list[Any] = [*rows[:, : min(_prompt_length(batch), task.context_length - 1)]]
    if asked.sample_prompt is not None:
        prompts, graded = [TextTokens(tokenizer).encode(asked.sample_prompt)], False
    if isinstance(tokenizer, FileTokenizer):
        ends = (*ends, *tokenizer.marks.end[-1:])
    new = generate(
        assembled.model(state),
        prompts,
        max_new_tokens=asked.sample_tokens,
        context_length=task.context_length,
        temperature=TEMPERATURE,
        stop_tokens=ends,
        tokenizer=tokenizer,
    )
    texts = [
        printable(f"{tokenizer.decode(prompt)}{text}")
        for prompt, text in zip(prompts, new.texts, strict=True)
    ]
    return TextSample(texts[0], grade(texts) if graded else None)


def _prompt_length(batch: Any) -> int:
    """Return how many tokens of a row the model continues: those before the first it learns."""
    mask = batch.get("mask")
    first = PROMPT_TOKENS - 1 if mask is None else int(np.argmax(np.asarray(mask)[0]))
    return first + 1
