"""The decoder of a model: with a cache where its program allows one, else by recomputing."""

import math
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from meshwright.errors import UserError, typed_line
from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.row_plan import plan_rows
from meshwright.generation.token_decoder import RecomputingDecoder, SplitModel, TokenDecoder
from meshwright.generation.traced_decoder import Loops, OtherOperations, TracedDecoder, trace_row
from meshwright.program.jaxpr.equations import Equation, aval_of


def make_decoder(
    model: SplitModel, length: int, *, divided: bool = False, kernel: str = ""
) -> TokenDecoder:
    """Return the decoder of a model that maps tokens [B, T] to logits [B, T, V].

    A row has at most ``length`` tokens, prompt and continuation together. Weights are ``divided``
    if devices have parts of them. A ``kernel`` computes attention over whole prompts.
    """
    try:
        return cached_decoder(model, length, divided=divided, kernel=kernel)
    except NotIncremental as reason:
        found = RecomputingDecoder(model.shapes, length, str(reason))
        seen = found.try_out(model.weights, logits_struct(model, length).shape[-1])
        if not seen:
            return found
        said = str(NotIncremental(f"the model {seen}", reason.at))
        try:
            logits_struct(model, length - 1)
        except Exception as error:
            raise UserError(
                f"{model.structure.name} cannot continue a text",
                why=f"{said}, so rows cannot be padded; with {length - 1:,} tokens alone it raises "
                f"{typed_line(error)}",
                fix="mask later positions in the model, or let it take any number of tokens",
            ) from error
        return RecomputingDecoder(model.shapes, length, said, seen)


def logits_struct(model: SplitModel, length: int) -> Any:
    """Return the shape and dtype of what a model makes of a row of tokens."""
    tokens = jax.ShapeDtypeStruct((1, length), np.dtype(np.int32))
    return jax.eval_shape(model.logits_of, [*model.weights, *model.source], tokens)


def cached_decoder(model: SplitModel, length: int, **how: Any) -> IncrementalDecoder:
    """Return a decoder with a cache; raises `NotIncremental` if there is none."""
    try:
        return IncrementalDecoder(TracedDecoder(model, length, **how), length)
    except OtherOperations:
        # A table as long as the row is not sliced. The last token of a row is never read.
        return IncrementalDecoder(TracedDecoder(model, length - 1, **how), length - 1)
    except NotIncremental as reason:
        for chunk in chunk_sizes(model, length):
            with suppress(NotIncremental):
                return chunked_decoder(model, length, chunk, divided=how["divided"])
        raise reason


def how_decoded(decoder: TokenDecoder) -> str:
    """Return in one line how the next token is computed."""
    if not decoder.reason:
        return "cached: each new token is read once"
    each = ", in a program of its own for each length" if decoder.sees else ""
    return f"recomputed: every new token reads all earlier ones again{each}: {decoder.reason}"


def chunk_sizes(model: SplitModel, length: int) -> list[int]:
    """Return the sizes of chunks that a model divides rows of a length into."""
    try:
        positions = Positions(trace_row(model, length, Loops(length, [])))
    except NotIncremental:
        return []
    return sorted({size for eqn in positions.jaxpr.eqns for size in _divided(positions, eqn)})


def _divided(positions: Positions, eqn: Equation) -> list[int]:
    if eqn.primitive.name != "reshape":
        return []
    shape, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    return [
        out[dim + 1]
        for inner in positions.of(eqn.invars[0])
        for dim in range(len(out) - 1)
        if math.prod(out[:dim]) == math.prod(shape[:inner])
        and min(out[dim : dim + 2]) > 1
        and out[dim] * out[dim + 1] == shape[inner]
    ]


def chunked_decoder(
    model: SplitModel, length: int, chunk: int, *, divided: bool
) -> IncrementalDecoder:
    """Return a decoder for a model that divides positions into chunks, such as Mamba 2.

    A state is passed on from chunk to chunk, and the tokens of a chunk that is not whole are read
    again. Two programs show that this is right, or `NotIncremental` is raised: one of several
    chunks, in which a chunk must depend on earlier ones alone, and one of a single chunk, in which
    a token must.
    """
    plan_rows(Positions(trace_row(model, chunk, Loops(chunk, []))))
    whole = -(-length // chunk) * chunk
    return IncrementalDecoder(TracedDecoder(model, whole, chunk, divided=divided), whole)
