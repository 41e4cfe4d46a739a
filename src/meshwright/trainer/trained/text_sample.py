"""A sample of text from a trained language model."""

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
ANSWERED_ROWS = 4
"""Prompts of conversations that are answered."""


class TextSample(NamedTuple):
    """A held-out text as the model continues it, its grade, and answers to prompts."""

    text: str
    grade: str | None = None
    completions: tuple[tuple[str, str], ...] = ()


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
    batch = source.batch(0, GRADED_ROWS if graded else ANSWERED_ROWS)
    chat = "mask" in batch
    rows = np.asarray(batch["tokens"] if "tokens" in batch else batch["inputs"])
    # What comes before the first token that is learned.
    lengths = np.asarray(batch["mask"]).argmax(axis=1) + 1 if chat else [PROMPT_TOKENS] * len(rows)
    longest = task.context_length - 1
    prompts = [row[: min(n, longest)] for row, n in zip(rows, lengths, strict=True)]
    prompts = prompts if graded or chat else prompts[:1]
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
    told = [printable(tokenizer.decode(prompt)) for prompt in prompts]
    said = [printable(str(text)) for text in new.texts]
    texts = [prompt + text for prompt, text in zip(told, said, strict=True)]
    answers = tuple(zip(told, said, strict=True)) if chat else ()
    return TextSample(texts[0], grade(texts) if graded else None, answers)
