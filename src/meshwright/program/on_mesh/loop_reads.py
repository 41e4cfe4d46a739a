"""Where loops read weights, by operations that every device can run on its own samples."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import REMATS, Atom, Literal, Var
from meshwright.program.on_mesh.grouped_convolutions import is_grouped
from meshwright.program.on_mesh.products import PRODUCTS

_READS = frozenset({*ELEMENTWISE, *PRODUCTS, "broadcast_in_dim", "gather"})
"""Operations that compute a sample's results from this sample and weights alone."""


@dataclass(frozen=True)
class LoopRead:
    """An operation in a loop that reads weights and treats every sample on its own.

    For each operand and its result, the dim that samples are in; None for an operand that has none.
    """

    operands: tuple[int | None, ...]
    result: int


@dataclass(frozen=True)
class LoopReads:
    """All operations in loops that read weights.

    Attributes:
        batch_axes: the mesh axes that samples are sharded over, and their sizes.
        by_result: the operations, by first result.
        weights: the variables in loops that hold trained weights, or what is computed from these
            alone.
    """

    batch_axes: Mapping[str, int]
    by_result: Mapping[Var, LoopRead]
    weights: frozenset[Var]

    @property
    def parts(self) -> int:
        """How many parts the samples are split into."""
        return math.prod(self.batch_axes.values())


NO_LOOP_READS = LoopReads({}, {}, frozenset())


def find_loop_reads(classes: DimClasses, batch_axes: Mapping[str, int]) -> LoopReads:
    """Return the operations in loops that read trained weights.

    ``batch_axes`` are the mesh axes that samples are sharded over, and their sizes.
    """
    found, weights = dict[Var, LoopRead](), set[Var]()
    for program in _in_loops(classes.root, inside=False) if batch_axes else ():
        weights |= {v for v in program.values if _is_weight(classes, program, v)}
        for number, eqn in enumerate(program.jaxpr.eqns):
            if eqn.primitive.name in _READS and not is_grouped(eqn):
                read = _read(classes, program, number, math.prod(batch_axes.values()))
                if read is not None:
                    found[eqn.outvars[0]] = read
    return LoopReads(batch_axes, found, frozenset(weights))


def _in_loops(program: ProgramDims, *, inside: bool) -> Iterator[ProgramDims]:
    """Yield the programs that scans run, nested ones included."""
    if inside:
        yield program
    for number, called in program.calls.items():
        name = program.jaxpr.eqns[number].primitive.name
        for inner in called if name in ("scan", "cond", *REMATS) else ():
            yield from _in_loops(inner, inside=inside or name == "scan")


def _read(classes: DimClasses, program: ProgramDims, number: int, parts: int) -> LoopRead | None:
    """Return how an equation reads weights; None if it does not, or not sample by sample."""
    eqn = program.jaxpr.eqns[number]
    mixes = classes.combines_samples(program, number)
    if mixes or not any(_is_weight(classes, program, atom) for atom in eqn.invars):
        return None
    atoms = [*eqn.invars, eqn.outvars[0]]
    dims = [classes.sample_dims(program, atom) for atom in atoms]
    if any(len(own) > 1 for own in dims) or not dims[-1]:
        return None
    for atom, own in zip(atoms, dims, strict=True):
        if own and not isinstance(atom, Literal):
            first = program.dims(atom)[own[0]][0]
            if first.id not in classes.batch or first.size % parts:
                return None
    return LoopRead(tuple(own[0] if own else None for own in dims[:-1]), dims[-1][0])


def _is_weight(classes: DimClasses, program: ProgramDims, atom: Atom) -> bool:
    """Whether a value is computed from trained weights alone, the same for all samples."""
    if isinstance(atom, Literal):
        return False
    value = program.values[atom]
    of_weights = bool(value.params) and value.has_grad and not value.has_data
    return of_weights and not classes.sample_dims(program, atom)
