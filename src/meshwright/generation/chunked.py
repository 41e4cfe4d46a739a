"""Models that divide positions into chunks, such as Mamba 2: the cache is that of whole chunks.

A state is passed on from chunk to chunk, and the tokens of a chunk that is not whole are read
again. Two programs show that this is right: one of several chunks, in which a chunk must depend on
earlier ones alone, and one of a single chunk, in which a token must.
"""

from __future__ import annotations

import math

from meshwright.generation.incremental import IncrementalDecoder
from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.row_plan import plan_rows
from meshwright.generation.token_decoder import SplitModel
from meshwright.generation.traced_decoder import Loops, TracedDecoder, trace_row
from meshwright.program.jaxpr.equations import Equation, aval_of


def chunk_sizes(model: SplitModel, length: int) -> list[int]:
    """Return the sizes of chunks that a model divides rows of a length into."""
    try:
        positions = Positions(trace_row(model, length, Loops(length, [])))
    except NotIncremental:
        return []
    eqns = positions.jaxpr.eqns
    return sorted({size for eqn in eqns for size in _divided(positions, eqn)})


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
    """Return a decoder that keeps what whole chunks leave; raises `NotIncremental`."""
    plan_rows(Positions(trace_row(model, chunk, Loops(chunk, []))))
    whole = -(-length // chunk) * chunk
    return IncrementalDecoder(TracedDecoder(model, whole, chunk, divided=divided), whole)
