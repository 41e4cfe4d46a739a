"""The loop of generation: chunks of tokens on devices, between them stops and smaller batches."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.generation.row_placement import RowPlacement
from meshwright.generation.sampling import Sampling
from meshwright.generation.token_decoder import Source, Weights
from meshwright.generation.token_programs import NewTokens, Prompts, TokenPrograms
from meshwright.text.units import counted

CHUNK = 32
"""The most tokens between two looks at what was generated."""
SMALL = 256
"""Lengths up to here are powers of two, longer ones multiples of it."""


class Ended(StrEnum):
    """Why a row ended."""

    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"
    MAX_NEW_TOKENS = "max_new_tokens"
    CONTEXT = "the model's context is full"


class Prompt(NamedTuple):
    """The tokens of a prompt, and what it has besides them.

    Its number in the call decides its random bits.
    """

    number: int
    tokens: NDArray[np.int32]
    source: Source = ()


@dataclass
class Row:
    """A continuation of a prompt.

    Attributes:
        sample: its number among those of the prompt.
        limit: the most tokens it may have.
        tokens: the new tokens; a stop token is the last.
        log_probs: their log-probabilities in the model's full distribution.
        drawn_log_probs: those in the distribution they were drawn from, after temperature, top-k
            and the like; 0 at temperature 0.
        ended: why it ended; None while it goes on.
        text: their text without a stop token or a stop string; None without a tokenizer.
    """

    prompt: Prompt
    sample: int
    limit: int
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    drawn_log_probs: list[float] = field(default_factory=list[float])
    ended: Ended | None = None
    text: str | None = None

    def end(self, reason: Ended, count: int) -> None:
        """End it after its first `count` tokens."""
        self.ended = reason
        for values in (self.tokens, self.log_probs, self.drawn_log_probs):
            del values[count:]


@dataclass
class Pace:
    """How many tokens came from programs that were compiled already, and in how many seconds."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second; None if every program ran for the first time."""
        return self.tokens / self.seconds if self.tokens else None

    def describe(self, overall: float) -> str:
        """Return the tokens per second with compilation, and without it."""
        warm = "" if self.rate is None else f", {self.rate:,.1f} without compiling"
        return f"{overall:,.1f} tokens/s{warm}"


Watch = Callable[[Row], None]
"""Looks at a row with new tokens, and may end it."""


@dataclass(frozen=True)
class TokenLoop:
    """Continues batches of prompts.

    Attributes:
        chunk: the most tokens between two looks at them.
        pace: where to note how fast they come.
    """

    programs: TokenPrograms
    weights: Weights
    sampling: Sampling
    seed: int
    max_new_tokens: int
    chunk: int = CHUNK
    pace: Pace = field(default_factory=Pace)

    def run(
        self, rows: Sequence[Row], watch: Watch = lambda row: None, *, may_stop: bool = True
    ) -> None:
        """Continue rows until all have ended; ``watch`` looks at those with new tokens.

        A batch runs at most 2 + log2(rows) programs of the model. If no row may stop before its
        limit, devices go on with the next tokens while the last ones are looked at.
        """
        programs, method, decoder = self.programs, self.sampling.method, self.programs.decoder
        numbers = programs.placement.put(self.sampling.numbers(programs.vocabulary, self.seed))
        size = row_bucket(len(rows), programs.placement)
        slots: list[Row | None] = [*rows, *[None] * (size - len(rows))]
        most = len(rows[0].prompt.tokens) if decoder.sees else decoder.length
        prompts = _prompts(slots, programs.placement, most)
        cache, state, new = programs.start(self.weights, numbers, prompts, method=method)
        unread, known, since = [(False, slots, new)], False, 0.0
        left = [0 if row is None else row.limit - 1 for row in slots]
        steps = chunk_size(max(left), 1 if decoder.sees else self.chunk)
        while True:
            while len(unread) > (0 if may_stop else 1):
                since = self._note(*unread.pop(0), watch, since, known)
            going = [n for n, row in enumerate(slots) if row and not row.ended and left[n] > 0]
            if not going:
                break
            size = row_bucket(len(going), programs.placement)
            if size < len(slots):
                which = going + going[:1] * (size - len(going))
                cache, state = programs.take(cache, state, np.array(which, np.int32))
                slots = [*(slots[n] for n in going), *[None] * (size - len(going))]
                left = [*(left[n] for n in going), *[0] * (size - len(going))]
            known = (size, steps, method) in programs.ran and not decoder.sees
            programs.ran.add((size, steps, method))
            cache, state, new = programs.advance(
                self.weights, numbers, cache=cache, rows=state, method=method, steps=steps
            )
            unread.append((known, slots, new))
            left = [count - steps for count in left]
        for each in unread:
            since = self._note(*each, watch, since, known)

    def _note(
        self,
        timed: bool,
        slots: Sequence[Row | None],
        new: NewTokens,
        watch: Watch,
        since: float,
        known: bool,
    ) -> float:
        """Add new tokens, and note how long they took unless a program was compiled meanwhile."""
        added, now = self._add(slots, new, watch), time.perf_counter()
        if timed and known:
            self.pace.tokens += added
            self.pace.seconds += now - since
        return now

    def _add(self, slots: Sequence[Row | None], new: NewTokens, watch: Watch) -> int:
        """Add new tokens to the rows that go on; return how many."""
        got: NewTokens = jax.device_get(new)
        before = sum(len(row.tokens) for row in slots if row is not None)
        for n, row in enumerate(slots):
            if row is None or row.ended:
                continue
            count = int(got.is_new[:, n].sum())
            token, log_prob, drawn = (values[:count, n].tolist() for values in got.chosen)
            row.tokens += token
            row.log_probs += log_prob
            row.drawn_log_probs += drawn
            if row.tokens[-1] in self.sampling.stop_tokens:
                row.ended = Ended.STOP_TOKEN
            elif len(row.tokens) >= row.limit:
                asked = row.limit == self.max_new_tokens
                row.ended = Ended.MAX_NEW_TOKENS if asked else Ended.CONTEXT
            watch(row)
        return sum(len(row.tokens) for row in slots if row is not None) - before


def _prompts(slots: Sequence[Row | None], placement: RowPlacement, most: int) -> Prompts:
    """Return the prompts of rows, with shapes that other batches have too.

    A prompt of several rows is read once, unless there are no fewer places than rows anyway.
    """
    rows = [row for row in slots if row is not None]
    numbers = list(dict.fromkeys(row.prompt.number for row in rows))
    count = row_bucket(len(numbers), placement)
    place = np.zeros(len(slots), np.int32)
    if count == len(slots):
        place[:] = np.arange(count)
    else:
        place[: len(rows)] = [numbers.index(row.prompt.number) for row in rows]
    longest = max(len(row.prompt.tokens) for row in rows)
    tokens = np.zeros((count, length_bucket(longest, most)), np.int32)
    lengths = np.ones(count, np.int32)
    source = tuple(np.stack([each] * count) for each in rows[0].prompt.source)
    for row, at in zip(rows, place, strict=False):
        lengths[at] = len(row.prompt.tokens)
        tokens[at, : lengths[at]] = row.prompt.tokens
        for all_of_them, own in zip(source, row.prompt.source, strict=True):
            all_of_them[at] = own

    def each(value: Callable[[Row], int]) -> NDArray[np.int32]:
        return np.array([0 if row is None else value(row) for row in slots], np.int32)

    return Prompts(
        tokens=tokens,
        lengths=lengths,
        place=place,
        limit=each(lambda row: row.limit),
        prompt=each(lambda row: row.prompt.number),
        sample=each(lambda row: row.sample),
        source=source,
    )


def batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Yield rows in batches."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def of_one_length(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows in groups whose prompts have the same length."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(len(row.prompt.tokens), []).append(row)
    return list(found.values())


def row_bucket(rows: int, placement: RowPlacement) -> int:
    """Return the size of a batch that holds so many rows: the parts of a mesh · a power of two."""
    return placement.parts * 2 ** math.ceil(math.log2(max(1, rows / placement.parts)))


def length_bucket(length: int, most: int) -> int:
    """Return a length, at most `most`, that is enough and that many calls share."""
    small = 2 ** math.ceil(math.log2(max(8, length)))
    return min(most, small if length <= SMALL else -(-length // SMALL) * SMALL)


def chunk_size(tokens: int, most: int) -> int:
    """Return the tokens of a chunk: equal chunks that are as large as allowed."""
    return max(1, -(-tokens // max(1, -(-tokens // most))))


@dataclass(frozen=True, repr=False)
class Generated(Sequence[Row]):
    """What a model generated: one `Row` after the other, sample by sample, in the prompts' order.

    Unlike the pace, the seconds include compilation. Remarks say what was taken from files, and
    what was done otherwise than asked.
    """

    rows: tuple[Row, ...]
    seconds: float
    remarks: tuple[str, ...] = ()
    pace: Pace = field(default_factory=Pace)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def texts(self) -> list[str | None]:
        """The text of each; None without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each."""
        return [row.tokens for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """The new tokens of all."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens by seconds, with compilation."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def __repr__(self) -> str:
        """Return how much there is."""
        return f"Generated({counted(len(self), 'row')}, {self.seconds:.1f} s)"

    def __str__(self) -> str:
        """Return the texts, or the tokens, and how fast they came."""
        lines = [
            f"{row.prompt.number}.{row.sample}: {row.tokens if row.text is None else row.text}  "
            f"[{counted(len(row.tokens), 'token')}, {row.ended}]"
            for row in self.rows
        ]
        rate = f"{self.pace.describe(self.tokens_per_second)}, in {self.seconds:.1f} s"
        return "\n".join([*lines, rate, *self.remarks])
