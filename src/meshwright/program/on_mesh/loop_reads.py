"""Where a device can read its own copy of weights, by operations on its own samples.

These are weights that loops read, and what is computed from weights alone and larger than they are,
such as a bias for each pair of positions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import variables
from meshwright.program.jaxpr.equations import PRODUCTS, REMATS, Atom, Literal, Var, aval_of
from meshwright.program.on_mesh.grouped_convolutions import is_grouped

_LARGER = 2
"""How many times as large as weights what is computed from them is, at least."""
_READS = frozenset({*ELEMENTWISE, *PRODUCTS, "broadcast_in_dim", "gather"})
"""Operations that compute a sample's results from this sample and weights alone."""


@dataclass(frozen=True)
class LoopRead:
    """An operation that reads weights and treats every sample on its own.

    For each operand and its result, the dim that samples are in; None for an operand that has none.
    """

    operands: tuple[int | None, ...]
    result: int


@dataclass(frozen=True)
class LoopReads:
    """All operations that read weights in loops, or what is larger than the weights it is made of.

    Attributes:
        batch_axes: the mesh axes that samples are sharded over, and their sizes.
        by_result: the operations, by first result.
        weights: the variables there that hold trained weights, or what is computed from these
            alone.
        enlarged: those of them that are outside of loops and larger than the weights they are
            computed from, with these.
    """

    batch_axes: Mapping[str, int]
    by_result: Mapping[Var, LoopRead]
    weights: frozenset[Var]
    enlarged: Mapping[Var, Sequence[Var]] = field(default_factory=dict[Var, Sequence[Var]])

    @property
    def parts(self) -> int:
        """How many parts the samples are split into."""
        return math.prod(self.batch_axes.values())


NO_LOOP_READS = LoopReads({}, {}, frozenset())


def find_loop_reads(classes: DimClasses, batch_axes: Mapping[str, int]) -> LoopReads:
    """Return the operations that read weights in loops, or what is larger than its weights.

    ``batch_axes`` are the mesh axes that samples are sharded over, and their sizes.
    """
    if not batch_axes:
        return NO_LOOP_READS
    found, weights = dict[Var, LoopRead](), set[Var]()
    enlarged, of_these = _enlarged(classes)
    for program in (classes.root, *_in_loops(classes.root, inside=False)):
        own = {v for v in program.values if _is_weight(classes, program, v)}
        weights |= of_these if program is classes.root else own
        for number, eqn in enumerate(program.jaxpr.eqns):
            if program is classes.root and of_these.isdisjoint(variables(eqn.invars)):
                continue
            if eqn.primitive.name in _READS and not is_grouped(eqn):
                read = _read(classes, program, number, math.prod(batch_axes.values()))
                if read is not None:
                    found[eqn.outvars[0]] = read
    return LoopReads(batch_axes, found, frozenset(weights), enlarged)


def _enlarged(classes: DimClasses) -> tuple[dict[Var, list[Var]], set[Var]]:
    """Return what is larger than the weights it is computed from, and all that is made of it."""
    program = classes.root
    enlarged, of_these = dict[Var, list[Var]](), set[Var]()
    for eqn in program.jaxpr.eqns:
        if len(eqn.outvars) != 1 or not _is_weight(classes, program, eqn.outvars[0]):
            continue
        own = [v for v in variables(eqn.invars) if _is_weight(classes, program, v)]
        size = sum(aval_of(v).size for v in own)
        if not of_these.isdisjoint(own):
            of_these.update(eqn.outvars)
        elif own and aval_of(eqn.outvars[0]).size >= _LARGER * size:
            enlarged[eqn.outvars[0]] = own
            of_these.update(eqn.outvars)
    return enlarged, of_these


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
