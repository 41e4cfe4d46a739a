"""The compiled programs of generation: reading prompts, adding tokens, dropping rows."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import UserError, argument
from meshwright.generation.make_decoder import make_decoder
from meshwright.generation.row_placement import RowPlacement, device_memory
from meshwright.generation.sampling import Chosen, Draws, Method, Numbers, choose
from meshwright.generation.token_decoder import (
    Cache,
    PerModel,
    Source,
    SplitModel,
    TokenDecoder,
    Weights,
)
from meshwright.text.units import counted, human_bytes
from meshwright.trees import bytes_on_device

USABLE = 0.95
"""The share of a device's memory that weights, caches and logits may take."""


class Rows(NamedTuple):
    """Where each row is; [B] each.

    Attributes:
        token: its last token, which the model has not read.
        position: where this token stands.
        new: its new tokens.
        limit: the most new tokens it may have.
        prompt: the number of its prompt.
        sample: the number of its sample.
        seen: bool [B, V], the tokens it has; [B, 0] unless repetition is penalized.
    """

    token: Array
    position: Array
    new: Array
    limit: Array
    done: Array
    prompt: Array
    sample: Array
    seen: Array


class NewTokens(NamedTuple):
    """What was chosen, [N, B] each, and whether a row had not ended before."""

    chosen: Chosen
    is_new: Array


class Prompts(NamedTuple):
    """Prompts to read, and the rows to continue them.

    Attributes:
        tokens: int32 [P, T], padded at the end.
        lengths: int32 [P].
        place: int32 [B], the prompt of each row, as a row of `tokens`.
        limit: int32 [B]; 0 for a row that only fills the batch.
        prompt: int32 [B], the number of the prompt in the call.
        sample: int32 [B].
        source: what prompts have besides their tokens, [P, …].
    """

    tokens: Any
    lengths: Any
    place: Any
    limit: Any
    prompt: Any
    sample: Any
    source: Source = ()


class TokenPrograms:
    """The programs of one decoder on one mesh, compiled once for each shape and method.

    ``ran`` are the sizes and methods of calls of `advance` so far, for which it is compiled.
    """

    def __init__(self, decoder: TokenDecoder, placement: RowPlacement, vocabulary: int) -> None:
        self.decoder = decoder
        self.placement = placement
        self.vocabulary = vocabulary
        self.ran: set[tuple[int, int, Method]] = set()
        self.start = jax.jit(self._start, static_argnames=("method",))
        # What gets longer cannot be written in place.
        donated = () if decoder.sees else ("cache", "rows")
        self.advance = jax.jit(
            self._advance, static_argnames=("method", "steps"), donate_argnames=donated
        )
        self.take = jax.jit(self._take)

    def _start(
        self, weights: Weights, numbers: Numbers, prompts: Prompts, *, method: Method
    ) -> tuple[Cache, Rows, NewTokens]:
        """Read the prompts, and choose the first token of each row."""
        whole, divide = self.placement.whole, self.placement.rows
        given = divide((prompts.tokens, prompts.lengths, prompts.source))
        logits, cache = self.decoder.start(weights, *given)
        if prompts.place.shape != prompts.lengths.shape:
            logits, cache = jax.tree.map(lambda a: a[prompts.place], (logits, cache))
        logits, cache = divide((logits, cache))
        lengths = prompts.lengths[prompts.place]
        seen = jnp.zeros((len(prompts.place), self.vocabulary if method.penalized else 0), bool)
        if method.penalized:
            real = jnp.arange(prompts.tokens.shape[1]) < prompts.lengths[:, None]
            row, at = jnp.arange(len(seen))[:, None], prompts.tokens[prompts.place]
            seen = seen.at[row, at].max(real[prompts.place])
        rows = Rows(
            token=jnp.zeros_like(lengths),
            position=lengths - 1,
            new=jnp.zeros_like(lengths),
            limit=prompts.limit,
            done=prompts.limit == 0,
            prompt=prompts.prompt,
            sample=prompts.sample,
            seen=seen,
        )
        rows, new = _choose(method, numbers, logits, rows)
        return cache, divide(rows), whole(jax.tree.map(lambda a: a[None], new))

    def _advance(
        self,
        weights: Weights,
        numbers: Numbers,
        cache: Cache,
        rows: Rows,
        *,
        method: Method,
        steps: int,
    ) -> tuple[Cache, Rows, NewTokens]:
        """Add `steps` tokens to each row."""

        def step(carry: tuple[Cache, Rows], _: None) -> tuple[tuple[Cache, Rows], NewTokens]:
            cache, rows = self.placement.rows(carry)
            own = weights
            if not self.placement.gathered:
                # Else compilers would gather them before the loop, and they would not fit.
                own, rows = jax.lax.optimization_barrier((weights, rows))
            logits, cache = self.decoder.step(own, cache, rows.token, rows.position)
            rows, new = _choose(method, numbers, logits, rows)
            return (cache, rows), new

        if self.decoder.sees:
            # Rows get longer with each token, so the next one needs another program.
            carry, new = step((cache, rows), None)
            return *carry, self.placement.whole(jax.tree.map(lambda a: a[None], new))
        (cache, rows), new = jax.lax.scan(step, (cache, rows), length=steps)
        return *self.placement.rows((cache, rows)), self.placement.whole(new)

    def _take(self, cache: Cache, rows: Rows, which: Array) -> tuple[Cache, Rows]:
        """Keep only some rows."""
        return self.placement.rows(jax.tree.map(lambda array: array[which], (cache, rows)))


def _choose(method: Method, numbers: Numbers, logits: Array, rows: Rows) -> tuple[Rows, NewTokens]:
    """Choose the next token of each row that has not ended."""
    draws = Draws(rows.prompt, rows.sample, rows.position + 1)
    chosen = choose(method, numbers, logits, draws, rows.seen, rows.new)
    going = ~rows.done
    token = jnp.where(going, chosen.token, rows.token)
    count = rows.new + going
    seen = rows.seen
    if method.penalized:
        seen = seen.at[jnp.arange(len(token)), token].max(going)
    ended = jnp.asarray(numbers.stops)[token] | (count >= rows.limit)
    moved = rows._replace(
        token=token, position=rows.position + going, new=count, done=rows.done | ended, seen=seen
    )
    return moved, NewTokens(chosen, going)


@PerModel
def token_programs(
    model: SplitModel, length: int, placement: RowPlacement, vocabulary: int
) -> TokenPrograms:
    """Return the programs of a model, from an earlier call if there are any.

    Its weights are where they are needed; ``length`` is the most tokens of a row.
    """
    divided, kernel = placement.divides_weights, placement.kernel
    decoder = make_decoder(model, length, divided=divided, kernel=kernel)
    return TokenPrograms(decoder, placement, vocabulary)


def fitting_programs(
    model: SplitModel, length: int, placement: RowPlacement, vocabulary: int, rows: int
) -> TokenPrograms:
    """Return the programs for a number of rows, with joined weights only if those fit, too."""
    limit, held = USABLE * device_memory(placement.mesh), bytes_on_device(model.weights)
    count, left, each = -(-rows // placement.parts), 0.0, 1
    for joins in (placement.joins, False):
        programs = token_programs(model, length, replace(placement, joins=joins), vocabulary)
        joined, cache = programs.decoder.extra_bytes
        # Besides the cache, logits, their exponentials and what is drawn from, in float32.
        left, each = limit - held - joined, cache // placement.tensor + 3 * 4 * vocabulary
        if count * each <= left:
            return programs
    most = int(left // each) * placement.parts
    raise UserError(
        f"{counted(rows, 'row')} of {length:,} tokens do not fit",
        why=f"of {human_bytes(limit)} of a device, weights take {human_bytes(held)}, and each of "
        f"its {count:,} rows {human_bytes(each)}",
        fix=f"write {argument('batch_size', most)}"
        if most > 0
        else f"use more devices, such as {argument('mesh', 'fsdp=8')}, or half precision",
    )
