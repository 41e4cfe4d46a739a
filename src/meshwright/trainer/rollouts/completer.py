"""Completes prompts, and has rewards score what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_template import ChatTemplate, no_template, template_of
from meshwright.data.document_marks import Files, named_ends
from meshwright.data.prompts import PROMPT
from meshwright.errors import ANY, Setting, UserError
from meshwright.generation.generate import make_generator
from meshwright.generation.text_settings import TextTokens, ends_of, turn_stops
from meshwright.generation.token_loop import CHUNK, Prompt, Row
from meshwright.processes import gather, process_count, process_index
from meshwright.rewards.reward_set import Group, RewardSet, Scored
from meshwright.runtime.heartbeat import own_heartbeat

Columns = Mapping[str, Any]
"""The columns of prompts: ``prompt``, and those that rewards read."""
Report = Callable[[str], None]


@dataclass
class Completer:
    """Completes prompts and scores the completions, for rollouts, evaluations and `eval`.

    Attributes:
        tokenizer: text to tokens and back; None if prompts are tokens.
        files: returns a file of the model's folder: what ends a text, and the chat template.
        eos_tokens: tokens that end a completion; None for those of the model.
    """

    rewards: RewardSet
    tokenizer: Any
    files: Files
    eos_tokens: Sequence[int] | None = None

    @cached_property
    def text(self) -> TextTokens:
        """Text to tokens and back."""
        return TextTokens(self.tokenizer, "the prompts have none")

    @cached_property
    def _template(self) -> ChatTemplate:
        found = template_of(self.files, "the model")
        if found is None:
            named = f"{Setting('model.weights', ANY)} or {Setting('data.tokenizer', ANY)}"
            raise no_template("the model's folder", f"name one that has it ({named}), or use texts")
        return found

    def encode(self, prompt: Any) -> NDArray[np.int32]:
        """Return the tokens of a prompt: a text, token ids, or the messages of a conversation."""
        if isinstance(prompt, str):
            return self.text.encode(prompt)
        if _is_chat(prompt):
            return self.text.encode(self._template.render(prompt), start=False)
        return np.asarray(prompt, np.int32)

    def complete(
        self, model: Any, columns: Columns, report: Report, *, first: int = 0, **settings: Any
    ) -> list[Row]:
        """Complete prompts, telling the progress; the settings are those of `mw.generate`.

        The number of the first prompt decides its random bits.
        """
        prompts = prompts_of(columns)
        stop, stop_tokens = (), self.eos_tokens
        if stop_tokens is None:
            named = [token for token, _ in named_ends(self.files)]
            turn, stop = (), ()
            if any(map(_is_chat, prompts)):
                turn, stop = turn_stops(self._template, self.text)
            stop_tokens = [*ends_of(named, self.tokenizer), *turn]
        generator = make_generator(
            model, tokenizer=self.tokenizer, stop=stop, stop_tokens=stop_tokens, **settings
        )
        total, done, tokens = len(prompts) * generator.samples, 0, 0

        def on_piece(piece: Any) -> None:
            nonlocal done, tokens
            own_heartbeat().tick()
            done, tokens = done + bool(piece.ended), tokens + len(piece.tokens)
            report(f"{done:,} of {total:,} completions, {tokens:,} tokens")

        checked = [generator.check(n, self.encode(each)) for n, each in enumerate(prompts)]
        return generator([Prompt(first + n, t) for n, t in enumerate(checked)], on_piece, CHUNK)

    def score(self, columns: Columns, rows: Sequence[Row]) -> tuple[list[Group], Scored]:
        """Score completions: each process those of its own prompts, and all get all."""
        groups, count = _groups(columns, rows), process_count()
        own = self.rewards.score(groups[process_index() :: count])
        if count == 1:
            return groups, own
        size = len(rows) // len(groups)
        values = np.empty((len(rows), len(self.rewards.names)))
        problems: dict[str, tuple[int, str]] = {}
        parts = gather([[[json_number(v) for v in row] for row in own.values], own.problems])
        for process, (found, wrong) in enumerate(parts):
            places = np.arange(len(groups))[process::count, None] * size + np.arange(size)
            values[places.ravel()] = np.array(found, float).reshape(-1, values.shape[1])
            for name, (lost, first) in wrong.items():
                problems[name] = (problems.get(name, (0, ""))[0] + lost, first)
        return groups, Scored(values, problems)


def prompts_of(columns: Columns) -> Sequence[Any]:
    """Return the prompts among the columns of data."""
    if PROMPT not in columns:
        raise UserError(
            "the data have no prompts",
            why=f"their columns are {', '.join(map(repr, columns)) or 'none'}",
            fix='give records such as {"prompt": "37+48=", "answer": "85"}',
        )
    return columns[PROMPT]


def json_number(value: Any) -> float | None:
    """Return a number for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def _groups(columns: Columns, rows: Sequence[Row]) -> list[Group]:
    """Return the completions of each prompt; texts, or tokens without a tokenizer."""
    others = {name: column for name, column in columns.items() if name != PROMPT}
    made = [row.tokens if row.text is None else row.text for row in rows]
    size = len(rows) // len(prompts_of(columns))
    return [
        Group(prompt, made[n * size : (n + 1) * size], {name: c[n] for name, c in others.items()})
        for n, prompt in enumerate(prompts_of(columns))
    ]


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
