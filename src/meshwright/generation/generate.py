"""`mw.generate`: continuing prompts with any model that maps tokens to logits."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from meshwright.config.argument_checks import check_count, clear_arguments, wrong_kind
from meshwright.data.tokenizer import FileTokenizer
from meshwright.errors import UserError, argument
from meshwright.generation.make_decoder import how_decoded
from meshwright.generation.model_facts import half_precision, position_limit, vocabulary_of
from meshwright.generation.row_placement import RowPlacement, placement_of
from meshwright.generation.sampling import Sampling
from meshwright.generation.text_settings import TextSettings, TextTokens, read_text_settings
from meshwright.generation.text_watch import OnPiece, TextWatch
from meshwright.generation.token_decoder import UNLIMITED, Source, SplitModel, split_model
from meshwright.generation.token_loop import (
    CHUNK,
    Ended,
    Generated,
    Pace,
    Prompt,
    Row,
    TokenLoop,
    batches,
    length_bucket,
    of_one_length,
)
from meshwright.generation.token_programs import fitting_programs
from meshwright.inputs.checks import mesh_sizes
from meshwright.mesh.build import build_mesh
from meshwright.runtime.activity import activity
from meshwright.text.units import counted

STREAMED_CHUNK = 16

Prompts = Any
"""A text, token ids, messages of a conversation, or a sequence or an array of those."""


@dataclass(frozen=True)
class Generator:
    """A model, and how it generates; each call continues further prompts.

    Attributes:
        model: maps tokens [B, T] to logits [B, T, V]; its weights are where they are needed.
        text: text to tokens and back.
        max_new_tokens: the most new tokens of a row.
        stops: strings that end a row.
        samples: continuations of each prompt.
        batch_size: rows at a time.
        context: the most tokens of a row.
        notes: what else turned out while generating.
        stated: whether the context is known to be right, and tables need not be looked for.
        pace: how fast tokens came so far.
        source: what prompts have besides their tokens: an array with a row for each, or none.
        chat: has the template of conversations.
    """

    model: SplitModel
    sampling: Sampling
    text: TextTokens
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    samples: int = 1
    seed: int = 0
    batch_size: int = 64
    context: int = UNLIMITED
    placement: RowPlacement = field(default_factory=RowPlacement)
    remarks: tuple[str, ...] = ()
    notes: set[str] = field(default_factory=set[str])
    stated: bool = False
    pace: Pace = field(default_factory=Pace)
    source: Source = ()
    chat: TextSettings = field(default_factory=TextSettings)

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model knows; refuses a model that is no decoder."""
        return vocabulary_of(self.model, min(8, self.context))

    def __call__(
        self, prompts: Sequence[Prompt], on_piece: OnPiece | None = None, chunk: int | None = None
    ) -> list[Row]:
        """Continue prompts.

        ``on_piece`` is called with what each row gets, at the latest after ``chunk`` tokens.
        """
        most = self.room(max(len(prompt.tokens) for prompt in prompts) + self.max_new_tokens)
        rows = [
            Row(prompt, sample, min(self.max_new_tokens, most - len(prompt.tokens)))
            for prompt in prompts
            for sample in range(self.samples)
        ]
        watch = TextWatch(self.text, self.stops, on_piece)
        chunk = chunk or (CHUNK if on_piece is None else STREAMED_CHUNK)
        programs, weights = None, self.model.weights
        for some in batches(rows, self.batch_size):
            need = max(len(row.prompt.tokens) + row.limit for row in some)
            last, length = programs, length_bucket(need, most)
            programs = fitting_programs(
                self.model, length, self.placement, self.vocabulary, len(some)
            )
            if programs is not last:
                weights = programs.decoder.prepare(self.model.weights)
            if programs.decoder.reason:
                self.notes.add(how_decoded(programs.decoder))
            loop = TokenLoop(
                programs, weights, self.sampling, self.seed, self.max_new_tokens, chunk, self.pace
            )
            for group in of_one_length(some) if programs.decoder.sees else [some]:
                loop.run(group, watch, may_stop=bool(self.stops or self.sampling.stop_tokens))
        return rows

    def room(self, count: int) -> int:
        """Return the most tokens of a row if so many are asked for.

        It is less where the context ends, or a table of positions in the model's program.
        """
        if self.stated:
            return self.context
        length = length_bucket(count, self.context)
        most, why = position_limit(self.model, length)
        if not most:
            raise UserError(
                f"{self.model.structure.name} cannot be called with {length:,} tokens",
                why=why,
                fix="pass context_length=, the most tokens that it takes",
            )
        if most < count:
            self.notes.add(f"a row has at most {most:,} tokens: {why}")
        return most

    def read(self, prompts: Prompts) -> list[Prompt]:
        """Return prompts as tokens, and refuse those that cannot be continued."""
        listed = _listed(prompts)
        if self.source and len(self.source[0]) != len(listed):
            raise UserError(
                f"source has {len(self.source[0]):,} rows for {counted(len(listed), 'prompt')}",
                fix="pass an array [prompts, …], a row for each prompt",
            )
        return [
            Prompt(number, self.check(number, prompt), tuple(s[number] for s in self.source))
            for number, prompt in enumerate(listed)
        ]

    def check(self, number: int, prompt: Any, *, whole: bool = True) -> NDArray[np.int32]:
        """Return the tokens of a prompt; refuse one that the model cannot read.

        A ``whole`` one must fit the context, with room for a new token.
        """
        tokens = self._tokens(number, prompt)
        wrong = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if wrong.size:
            raise UserError(
                f"prompt {number} has the token {wrong[0]}, which the model does not know",
                why=f"its {self.vocabulary:,} tokens are 0 to {self.vocabulary - 1}",
                fix="use the tokenizer that the model was trained with",
            )
        if whole and not tokens.size:
            raise UserError(
                f"prompt {number} is empty" if number else "the prompt is empty",
                why="a model predicts what follows at least one token",
                fix="write how the text begins",
            )
        context = self.room(tokens.size + 1) if whole else self.context
        if whole and tokens.size >= context:
            raise UserError(
                f"prompt {number} leaves no room for new tokens",
                why=f"it has {tokens.size:,} tokens, and the model's context {context:,}",
                fix=f"shorten it to at most {context - 1:,} tokens",
            )
        return tokens

    def _tokens(self, number: int, prompt: Any) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            return self.text.encode(prompt)
        if _are_talks([prompt]):
            return self.text.encode(self.chat.chat.render(prompt), start=False)
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise UserError(
                f"prompt {number} is neither a text nor token ids",
                why=f"it has the shape {list(tokens.shape)} and the type {tokens.dtype}",
                fix='write prompts such as ["Once"] or [[1, 2, 3]]',
            )
        return tokens.astype(np.int32)


@clear_arguments("mw.generate")
def generate(
    model: nnx.Module,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    stop: str | Sequence[str] = (),
    stop_tokens: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    samples: int = 1,
    seed: int = 0,
    tokenizer: Any = None,
    batch_size: int = 64,
    context_length: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    dtype: Any = None,
    on_piece: OnPiece | None = None,
    source: Any = None,
) -> Generated:
    """Continue prompts with a model that maps tokens [B, T] to logits [B, T, V].

    The model stays as it is; it runs in evaluation mode. A row's tokens do not depend on the other
    rows, on their number or on the mesh, up to rounding.

    Args:
        model: the model.
        prompts: texts, lists of token ids or an array of them, or conversations to answer by the
            folder's chat template, lists of ``{"role": …, "content": …}``; or a single one.
        max_new_tokens: the most new tokens of each.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution. By
            default what the folder's generation_config.json says, or 0; so for the next four.
        top_k: sample from the k likeliest tokens only; 0 means all.
        top_p: sample from the likeliest tokens that reach this probability together.
        min_p: sample from tokens with at least this share of the likeliest one's probability.
        repetition_penalty: more than 1 makes tokens that a row has already less likely.
        logit_bias: what to add to the logits of tokens, by token.
        stop: a string, or several, that end a text; they are not part of it.
        stop_tokens: tokens that end a row; by default those that the folder names.
        min_new_tokens: new tokens before a stop token may come.
        samples: continuations of each prompt.
        seed: decides the samples, with the prompt's number, the sample's and the position alone.
        tokenizer: a tokenizer, its file, or a Hugging Face or run folder, whose stop tokens and
            sampling settings are used too.
        batch_size: rows at a time.
        context_length: the most tokens of a row that the model takes; by default the attribute
            ``context_length`` of the model or its parts.
        mesh: where to run: axis sizes; by default on the devices that the model's weights are on.
        dtype: format of the weights while generating, such as ``bfloat16``.
        on_piece: called with a `Piece` whenever a row has got more text.
        source: for a model with an encoder, called as ``model(source, tokens)``: an array with a
            row for each prompt. What follows from it alone is computed once.
    """
    settings = {**locals()}
    del settings["model"], settings["prompts"], settings["on_piece"]
    generator = make_generator(model, **settings, answers=_are_talks(_listed(prompts)))
    started = time.perf_counter()
    with activity("generating", afterwards=False):
        rows = generator(generator.read(prompts), on_piece)
    return generated(generator, rows, started)


def make_generator(
    model: Any,
    *,
    max_new_tokens: int,
    tokenizer: Any = None,
    stop: str | Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
    batch_size: int = 64,
    context_length: int | None = None,
    mesh: Any = None,
    dtype: Any = None,
    source: Any = None,
    answers: bool = False,
    **sampling: Any,
) -> Generator:
    """Return how a model generates; the arguments are those of `generate`.

    With ``answers``, texts end as the chat template ends them.
    """
    if not isinstance(model, nnx.Module):
        raise wrong_kind("model", model, "pass an nnx.Module, such as mw.load_model(folder)")
    counts = {"max_new_tokens": max_new_tokens, "samples": samples, "batch_size": batch_size}
    for name, count in counts.items():
        check_count(name, count)
    check_count("seed", seed, least=0, most=2**32 - 1)
    text, found = read_tokenizer(tokenizer)
    found = replace(found, answers=found.answers or answers)
    chosen, remarks = _with_defaults(sampling, found)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if sampling.get("stop_tokens") is None and text.tokenizer is not None:
        stops += found.stops
    _check_stops(stops, text)
    _check_samples(samples, chosen)
    given = () if source is None else (np.asarray(jnp.asarray(source)),)
    split = split_model(model, half_precision(dtype), given)
    own = split.structure.context
    context = own if context_length is None else context_length
    check_count("context_length", context)
    mesh = mesh if mesh is None or isinstance(mesh, Mesh) else build_mesh(mesh_sizes(mesh))
    placement = placement_of(split.weights, mesh)
    if placement.divides_weights:
        # A model that is no decoder is refused before its program is looked at.
        vocabulary_of(split, min(8, context))
    placement, weights, remark = placement.place(split, dtype)
    return Generator(
        model=replace(split, weights=weights),
        sampling=chosen,
        text=text,
        max_new_tokens=max_new_tokens,
        stops=stops,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        context=context,
        placement=placement,
        remarks=tuple(filter(None, (*remarks, remark))),
        stated=context <= own < UNLIMITED,
        source=given,
        chat=found,
    )


def _check_samples(samples: int, chosen: Sampling) -> None:
    if samples > 1 and chosen.greedy:
        raise UserError(
            f"{argument('samples', samples)} would all be the same",
            why="the temperature is 0, which takes the likeliest token",
            fix=f"write {argument('temperature', 1)}",
        )


def _check_stops(stops: Sequence[str], text: TextTokens) -> None:
    if stops and (text.tokenizer is None or not all(stops)):
        given = stops[0] if len(stops) == 1 else list(stops)
        raise UserError(
            f"{argument('stop', given)} cannot be looked for",
            why="there is no tokenizer" if all(stops) else "one is empty",
            fix=f"stop at tokens with {argument('stop_tokens')}" if all(stops) else "",
        )


def generated(generator: Generator, rows: Sequence[Row], started: float) -> Generated:
    """Return finished rows as the user gets them."""
    full = [row for row in rows if row.ended is Ended.CONTEXT]
    context = max((len(row.prompt.tokens) + len(row.tokens) for row in full), default=0)
    remark = (
        f"{counted(len(full), 'row')} ended before "
        f"{argument('max_new_tokens', generator.max_new_tokens)}, because the model's context of "
        f"{context:,} tokens was full"
    )
    remarks = (*generator.remarks, *sorted(generator.notes), *([remark] if full else []))
    return Generated(tuple(rows), time.perf_counter() - started, remarks, generator.pace)


def read_tokenizer(tokenizer: Any) -> tuple[TextTokens, TextSettings]:
    """Return a tokenizer given in any form, and what its folder says."""
    if isinstance(tokenizer, TextSettings):
        where = f"{tokenizer.folder} has no tokenizer.json"
        return TextTokens(tokenizer.tokenizer, where), tokenizer
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        if path.is_dir():
            return read_tokenizer(read_text_settings(path))
        return TextTokens(FileTokenizer(str(path))), TextSettings()
    return TextTokens(tokenizer, "none was given"), TextSettings()


def _with_defaults(
    given: Mapping[str, Any], found: TextSettings
) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling asked for, completed from a folder, and what comes from there."""
    asked = {key: value for key, value in given.items() if value is not None}
    taken = {key: value for key, value in found.sampling.items() if key not in asked}
    if asked.get("temperature") == 0:
        taken = {key: value for key, value in taken.items() if key == "repetition_penalty"}
    if found.stop_tokens and "stop_tokens" not in asked:
        taken["stop_tokens"] = found.stop_tokens
    shown = {key: list(v) if isinstance(v, tuple) else v for key, v in taken.items()}
    said = ", ".join(argument(key, value) for key, value in shown.items())
    return Sampling(**{**taken, **asked}), ((f"from {found.folder}: {said}",) if said else ())


def _listed(prompts: Prompts) -> list[Any]:
    """Return several prompts, also if one was given."""
    if isinstance(prompts, str):
        return [prompts]
    each = list(prompts)
    if _are_talks([each]):
        return [each]
    single = all(np.ndim(one) == 0 and not isinstance(one, str) for one in each)
    return [prompts] if single else each


def _are_talks(prompts: Sequence[Any]) -> bool:
    """Whether all prompts are lists of messages."""
    return bool(prompts) and all(
        isinstance(one, list | tuple) and one and all(isinstance(each, Mapping) for each in one)
        for one in prompts
    )
