"""The traced program in pieces: blocks, which can be rematerialized, and what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.program.blocks.block_lists import find_block_lists
from meshwright.program.jaxpr.equations import Equation, Jaxpr, Literal, Var


@dataclass(frozen=True)
class Outer:
    """Equations outside of blocks."""

    eqns: tuple[Equation, ...]


@dataclass(frozen=True)
class Unit:
    """One block.

    Attributes:
        path: its module path.
        eqns: its equations.
        reads: values from outside it reads.
        results: its values that are read outside.
    """

    path: str
    eqns: tuple[Equation, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]


Segment = Outer | Unit


def cut(jaxpr: Jaxpr) -> list[Segment]:
    """Cut a program at the elements of its lists of modules."""
    pieces: list[Segment] = []
    done = 0
    for blocks in find_block_lists(jaxpr.eqns):
        for index, (start, stop) in enumerate(blocks.ranges):
            pieces.append(Outer(tuple(jaxpr.eqns[done:start])))
            pieces.append(_unit(jaxpr, blocks.block_path(index), start, stop))
            done = stop
    pieces.append(Outer(tuple(jaxpr.eqns[done:])))
    return [piece for piece in pieces if piece.eqns]


def _unit(jaxpr: Jaxpr, path: str, start: int, stop: int) -> Unit:
    eqns = jaxpr.eqns[start:stop]
    own = {variable for eqn in eqns for variable in eqn.outvars}
    later = set(reads(jaxpr.eqns[stop:])) | {a for a in jaxpr.outvars if not isinstance(a, Literal)}
    outside = [variable for variable in reads(eqns) if variable not in own]
    results = [v for eqn in eqns for v in eqn.outvars if v in later]
    return Unit(path, tuple(eqns), tuple(outside), tuple(results))


def reads(eqns: Sequence[Equation]) -> list[Var]:
    """Return the variables equations read, each once, in order."""
    found: dict[Var, None] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                found[atom] = None
    return list(found)
