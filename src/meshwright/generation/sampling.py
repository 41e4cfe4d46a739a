"""Choosing tokens from logits: what is left to draw from, the draw, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.config.argument_checks import check_count, check_kind
from meshwright.errors import UserError, argument

BLOCK = 64
"""Neighbors in the vocabulary that are looked at together, and whose noise has one key."""
SHARE = 4
"""Tokens are drawn from the likeliest blocks alone if these are at most this part of all."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the effects are applied in this order.

    Attributes:
        logit_bias: what is added to the logits of tokens, by token.
        repetition_penalty: logits of tokens that a row has already are divided by it if positive,
            and multiplied if negative.
        stop_tokens: tokens that end a row.
        min_new_tokens: new tokens of a row before it may end by a stop token.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the k likeliest tokens are left; 0 leaves all.
        top_p: only the likeliest tokens that reach this probability together are left.
        min_p: only tokens with at least this share of the likeliest one's probability are left.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    repetition_penalty: float = 1.0
    stop_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_count("top_k", self.top_k, least=0)
        check_count("min_new_tokens", self.min_new_tokens, least=0)
        ranges = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "more than 0; 1 does nothing"),
        }
        for name, (valid, allowed) in ranges.items():
            value = getattr(self, name)
            if not valid or not np.isfinite(value):
                fix = f"write a number {allowed}"
                raise UserError(f"{argument(name, value)} is not valid", fix=fix)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def method(self) -> Method:
        """What a program must compute; the numbers are its inputs."""
        return Method(
            greedy=self.greedy,
            biased=bool(self.logit_bias),
            penalized=self.repetition_penalty != 1,
            barred=self.min_new_tokens > 0 and len(self.stop_tokens) > 0,
            top_k=1 << (self.top_k - 1).bit_length() if self.top_k and not self.greedy else 0,
            top_p=self.top_p < 1 and not self.greedy,
            min_p=self.min_p > 0 and not self.greedy,
        )

    def numbers(self, vocabulary: int, seed: int) -> Numbers:
        """Return the inputs of a program, for tokens below `vocabulary`."""
        stops, bias = np.zeros(vocabulary, bool), np.zeros(vocabulary, np.float32)
        stops[self._known("stop_tokens", self.stop_tokens, vocabulary)] = True
        tokens = self._known("logit_bias", tuple(self.logit_bias), vocabulary)
        bias[tokens] = list(self.logit_bias.values())
        return Numbers(
            seed=np.uint32(seed & 0xFFFFFFFF),
            stops=stops,
            bias=bias,
            penalty=np.float32(self.repetition_penalty),
            min_new=np.int32(self.min_new_tokens),
            temperature=np.float32(self.temperature or 1.0),
            top_k=np.float32(min(self.top_k or vocabulary, vocabulary)),
            top_p=np.float32(self.top_p),
            min_p=np.float32(self.min_p),
        )

    def _known(self, name: str, tokens: Sequence[int], vocabulary: int) -> list[int]:
        for token in tokens:
            check_kind(name, token, (int, np.integer), "write token ids")
            if not 0 <= token < vocabulary:
                raise UserError(
                    f"{argument(name)} has the token {token}, which the model does not know",
                    why=f"its {vocabulary:,} tokens are 0 to {vocabulary - 1}",
                    fix=f"write {argument(name)} with tokens of this model",
                )
        return [int(token) for token in tokens]


class Method(NamedTuple):
    """What is done to logits; it decides which program is compiled.

    ``top_k`` is a power of two that is not below the number of tokens that are left; 0 leaves all.
    """

    greedy: bool = True
    biased: bool = False
    penalized: bool = False
    barred: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False


class Numbers(NamedTuple):
    """The numbers of a `Sampling`, as arrays; `stops` and `bias` are [V]."""

    seed: Any
    stops: Any
    bias: Any
    penalty: Any
    min_new: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


class Draws(NamedTuple):
    """What the random bits of each row are a function of, besides the seed; int32 [B] each."""

    prompt: Array
    sample: Array
    position: Array


class Chosen(NamedTuple):
    """Tokens [B] and their log-probabilities [B].

    Attributes:
        log_prob: of the model's full distribution.
        drawn_log_prob: of the distribution that was drawn from; 0 at temperature 0.
    """

    token: Array
    log_prob: Array
    drawn_log_prob: Array


def choose(
    method: Method, numbers: Numbers, logits: Array, draws: Draws, seen: Array, count: Array
) -> Chosen:
    """Choose a token for each row.

    Args:
        method: what to do.
        numbers: with which numbers.
        logits: of the model, [B, V].
        draws: which random bits each row has.
        seen: bool [B, V], the tokens that a row has; read for a repetition penalty only.
        count: int32 [B], the new tokens that a row has.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    changed = logits
    if method.biased:
        changed = changed + numbers.bias
    if method.penalized:
        changed = penalize(changed, seen, numbers.penalty)
    if method.barred:
        early = (count < numbers.min_new)[:, None]
        changed = jnp.where(early & numbers.stops, -jnp.inf, changed)
    if method.greedy:
        token = jnp.argmax(changed, axis=-1).astype(jnp.int32)
        return Chosen(token, _log_prob(logits, token), jnp.zeros_like(logits[:, 0]))
    left, blocks = changed / numbers.temperature, None
    if method.top_k and method.top_k * 4 * SHARE * BLOCK <= logits.shape[-1]:
        left, blocks = likeliest_blocks(left, method.top_k * 4)
    if method.top_k:
        left = keep_top_k(left, numbers.top_k)
    if method.top_p:
        left = keep_top_p(left, numbers.top_p)
    if method.min_p:
        left = keep_min_p(left, numbers.min_p)
    place = jnp.argmax(left + gumbel(numbers.seed, draws, left.shape[-1], blocks), axis=-1)
    drawn_log_prob, token = _log_prob(left, place), place
    if blocks is not None:
        token = BLOCK * _at(blocks, place // BLOCK) + place % BLOCK
    token = token.astype(jnp.int32)
    return Chosen(token, _log_prob(logits, token), drawn_log_prob)


def likeliest_blocks(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the logits [B, count · BLOCK] of the blocks with the likeliest tokens, and the blocks.

    The likeliest tokens are among those of as many blocks. Four times as many leave room for ties;
    of a tie of more tokens than that, the first ones are left.
    """
    width = -logits.shape[-1] % BLOCK
    logits = jnp.pad(logits, ((0, 0), (0, width)), constant_values=-jnp.inf)
    grouped = logits.reshape(logits.shape[0], -1, BLOCK)
    blocks = jnp.sort(jax.lax.top_k(grouped.max(axis=-1), count)[1], axis=-1)
    found = jnp.take_along_axis(grouped, blocks[:, :, None], axis=1)
    return found.reshape(logits.shape[0], -1), blocks


def penalize(logits: Array, seen: Array, penalty: Any) -> Array:
    """Make tokens that were seen less likely."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Array, k: Any) -> Array:
    """Leave the k likeliest tokens, and those as likely as the last of them."""
    return _keep_likeliest(logits, lambda kept: kept.sum(axis=-1, dtype=jnp.float32) >= k)


def keep_top_p(logits: Array, p: Any) -> Array:
    """Leave the fewest likeliest tokens that reach probability p together, ties included."""
    shares = jax.nn.softmax(logits, axis=-1)
    return _keep_likeliest(logits, lambda kept: jnp.where(kept, shares, 0).sum(axis=-1) >= p)


def keep_min_p(logits: Array, p: Any) -> Array:
    """Leave tokens with at least p times the probability of the likeliest."""
    least = logits.max(axis=-1, keepdims=True) + jnp.log(p)
    return jnp.where(logits >= least, logits, -jnp.inf)


def gumbel(seed: Any, draws: Draws, size: int, blocks: Array | None = None) -> Array:
    """Return the noise [B, size] of each row, whatever the other rows are.

    It is that of all tokens, or of those in some ``blocks`` [B, N].
    """

    def row(prompt: Array, sample: Array, position: Array, blocks: Array) -> Array:
        # The generator of the user's settings would change what a seed means.
        key = jax.random.key(seed, impl="threefry2x32")
        for number in (prompt, sample, position):
            key = jax.random.fold_in(key, number)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, blocks)
        draw = jax.vmap(lambda key: jax.random.gumbel(key, (BLOCK,), jnp.float32))
        return draw(keys).reshape(-1)[:size]

    if blocks is None:
        return jax.vmap(row, (0, 0, 0, None))(*draws, jnp.arange(-(-size // BLOCK)))
    return jax.vmap(row)(*draws, blocks)


def _keep_likeliest(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """Leave the fewest likeliest tokens that are enough; a tie is kept whole.

    The threshold is found three bits at a time: sorting a vocabulary would take longer than a small
    model, and so would reading it for each bit.
    """
    # Bits of floats, ordered like the floats; adding 0 makes both zeros the same.
    size = jnp.finfo(logits.dtype).bits
    kind = jnp.dtype(f"uint{size}")
    bits = jax.lax.bitcast_convert_type(logits + 0, kind)
    top = jnp.array(1, kind) << (size - 1)
    bits = jnp.where(bits & top, ~bits, bits | top)

    def settle(n: Any, threshold: Array) -> Array:
        last = (3 * (turns - 1 - n)).astype(kind)
        count = jnp.zeros_like(threshold)
        # The higher a threshold, the fewer tokens. Compilers take these sums in one pass.
        for digit in range(1, 8):
            higher = jnp.array(digit, kind) << last
            reached = enough(bits >= (threshold | higher)[:, None])
            count += reached & (higher >> last == digit)
        return threshold | (count << last)

    turns = -(-size // 3)
    threshold = jax.lax.fori_loop(0, turns, settle, jnp.zeros(logits.shape[0], kind))
    return jnp.where(bits >= threshold[:, None], logits, -jnp.inf)


def _log_prob(logits: Array, token: Array) -> Array:
    return _at(logits, token) - jax.nn.logsumexp(logits, axis=-1)


def _at(rows: Array, place: Array) -> Array:
    """Return an element of each row."""
    return jnp.take_along_axis(rows, place[:, None], axis=-1)[:, 0]
