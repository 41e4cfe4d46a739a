"""Where loops read weights, by operations that every device can run on its own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.program.dims import DimClasses, Frame
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxpr.equations import REMATS, Atom, Literal, Var
from meshwright.program.on_mesh.grouped_convolutions import is_grouped
from meshwright.program.on_mesh.products import PRODUCTS

_READS = frozenset({*ELEMENTWISE, *PRODUCTS, "broadcast_in_dim", "gather"})
"""Operations that compute a sample's results from this sample and weights, whatever its number."""


@dataclass(frozen=True)
class LoopRead:
    """An operation in a loop that reads weights and treats every sample by itself.

    Attributes:
        operands: for each operand, the dim that samples are in; None if it has none.
        result: the dim that they are in in its result.
    """

    operands: tuple[int | None, ...]
    result: int


@dataclass(frozen=True)
class LoopReads:
    """All operations in loops that read weights.

    Attributes:
        batch_axes: the mesh axes samples are divided over, and their sizes.
        by_result: the operations, by first result.
        weights: the variables in loops that hold trained weights, or what is computed from these
            alone.
    """

    batch_axes: Mapping[str, int]
    by_result: Mapping[Var, LoopRead]
    weights: frozenset[Var]

    @property
    def parts(self) -> int:
        """How many parts the samples are divided into."""
        return math.prod(self.batch_axes.values())


NO_LOOP_READS = LoopReads({}, {}, frozenset())


def find_loop_reads(classes: DimClasses, batch_axes: Mapping[str, int]) -> LoopReads:
    """Return the operations in loops that read trained weights.

    Args:
        classes: the dims of the program's variables, and its events.
        batch_axes: the mesh axes samples are divided over, and their sizes.
    """
    found, weights = dict[Var, LoopRead](), set[Var]()
    for frame in _in_loops(classes.root, inside=False) if batch_axes else ():
        weights |= {v for v in frame.values if _is_weight(classes, frame, v)}
        for number, eqn in enumerate(frame.jaxpr.eqns):
            if eqn.primitive.name in _READS and not is_grouped(eqn):
                read = _read(classes, frame, number, math.prod(batch_axes.values()))
                if read is not None:
                    found[eqn.outvars[0]] = read
    return LoopReads(batch_axes, found, frozenset(weights))


def _in_loops(frame: Frame, *, inside: bool) -> Iterator[Frame]:
    """Yield the programs that scans run, nested ones included."""
    if inside:
        yield frame
    for number, called in frame.calls.items():
        name = frame.jaxpr.eqns[number].primitive.name
        for inner in called if name in ("scan", "cond", *REMATS) else ():
            yield from _in_loops(inner, inside=inside or name == "scan")


def _read(classes: DimClasses, frame: Frame, number: int, parts: int) -> LoopRead | None:
    """Return how an equation reads weights; None if it does not, or not sample by sample."""
    eqn = frame.jaxpr.eqns[number]
    events = (classes.events[n] for n in frame.noted.get(number, ()))
    mixes = any(e.kind != "spread" and e.classes & classes.batch for e in events)
    if mixes or not any(_is_weight(classes, frame, atom) for atom in eqn.invars):
        return None
    atoms = [*eqn.invars, eqn.outvars[0]]
    dims = [_sample_dims(classes, frame, atom) for atom in atoms]
    divisible = all(
        len(own) <= 1 and all(_is_divisible(classes, frame, atom, dim, parts) for dim in own)
        for atom, own in zip(atoms, dims, strict=True)
    )
    if not divisible or not dims[-1]:
        return None
    return LoopRead(tuple(own[0] if own else None for own in dims[:-1]), dims[-1][0])


def _sample_dims(classes: DimClasses, frame: Frame, atom: Atom) -> list[int]:
    """Return the dims of a value that have samples in them."""
    if isinstance(atom, Literal):
        return []
    dims = enumerate(frame.dims(atom))
    return [number for number, dim in dims if any(a.id in classes.batch for a in dim)]


def _is_divisible(classes: DimClasses, frame: Frame, atom: Atom, dim: int, parts: int) -> bool:
    """Whether the samples in a dim of a value can be divided into equal parts."""
    assert not isinstance(atom, Literal)
    first = frame.dims(atom)[dim][0]
    return first.id in classes.batch and first.size % parts == 0


def _is_weight(classes: DimClasses, frame: Frame, atom: Atom) -> bool:
    """Whether a value is computed from trained weights alone, the same for all samples."""
    if isinstance(atom, Literal):
        return False
    value = frame.values[atom]
    of_weights = bool(value.params) and value.has_grad and not value.has_data
    return of_weights and not _sample_dims(classes, frame, atom)
