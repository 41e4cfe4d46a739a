"""The traced program in segments: blocks, which can be rematerialized, and what is around them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from meshwright.program.blocks.block_lists import find_block_lists
from meshwright.program.evaluate.dependencies import variables, variables_read
from meshwright.program.jaxpr.equations import Equation, Jaxpr, Var


@dataclass(frozen=True)
class Outside:
    """Equations outside of blocks."""

    eqns: tuple[Equation, ...]


@dataclass(frozen=True)
class BlockSegment:
    """One block.

    Attributes:
        eqns: its equations.
        reads: values from outside it reads.
        results: its values that are read outside.
    """

    eqns: tuple[Equation, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]


Segment = Outside | BlockSegment


def cut_segments(jaxpr: Jaxpr) -> list[Segment]:
    """Cut a program before and after each block."""
    segments: list[Segment] = []
    done = 0
    for blocks in find_block_lists(jaxpr.eqns):
        for start, stop in blocks.ranges:
            segments.append(Outside(tuple(jaxpr.eqns[done:start])))
            segments.append(_block(jaxpr, start, stop))
            done = stop
    segments.append(Outside(tuple(jaxpr.eqns[done:])))
    return [segment for segment in segments if segment.eqns]


def cut_iteration(jaxpr: Jaxpr) -> list[BlockSegment]:
    """Cut an iteration of a loop over repeated blocks before each block but the first."""
    lists = [blocks for blocks in find_block_lists(jaxpr.eqns) if blocks.is_period]
    starts = [start for blocks in lists[:1] for start, _ in blocks.ranges[1:]]
    cuts = [0, *starts, len(jaxpr.eqns)]
    return [_block(jaxpr, start, stop) for start, stop in pairwise(cuts)]


def whole_program(jaxpr: Jaxpr) -> BlockSegment:
    """Return a program as one block."""
    return _block(jaxpr, 0, len(jaxpr.eqns))


def _block(jaxpr: Jaxpr, start: int, stop: int) -> BlockSegment:
    eqns = jaxpr.eqns[start:stop]
    computed = [variable for eqn in eqns for variable in eqn.outvars]
    read_later = {*variables_read(jaxpr.eqns[stop:]), *variables(jaxpr.outvars)}
    inside = set(computed)
    return BlockSegment(
        eqns=tuple(eqns),
        reads=tuple(variable for variable in variables_read(eqns) if variable not in inside),
        results=tuple(variable for variable in computed if variable in read_later),
    )
