"""Where loops read weights, by operations that every device can run on its own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from meshwright.program.dims import DimClasses, Frame
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.jaxpr.equations import REMATS, Atom, Literal, Var
from meshwright.program.on_mesh.grouped_convolutions import is_grouped
from meshwright.program.on_mesh.pins import activation_spec
from meshwright.program.on_mesh.products import PRODUCTS

_READS = frozenset({*ELEMENTWISE, *PRODUCTS, "broadcast_in_dim", "gather"})
"""Operations that compute a sample's results from this sample and weights, whatever its number."""


@dataclass(frozen=True)
class LoopRead:
    """An operation in a loop that reads weights and treats every sample by itself.

    Attributes:
        operands: the layouts of the operands; without samples, the whole array.
        results: the layouts of the results.
    """

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


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
                read = _read(classes, frame, number, batch_axes)
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


def _read(
    classes: DimClasses, frame: Frame, number: int, batch_axes: Mapping[str, int]
) -> LoopRead | None:
    eqn = frame.jaxpr.eqns[number]
    events = (classes.events[n] for n in frame.noted.get(number, ()))
    if any(e.kind != "spread" and e.classes & classes.batch for e in events):
        return None
    if not any(_is_weight(classes, frame, atom) for atom in eqn.invars):
        return None
    operands = [_layout(classes, frame, atom, batch_axes) for atom in eqn.invars]
    results = [_layout(classes, frame, atom, batch_axes) for atom in eqn.outvars]
    layouts = [spec for spec in (*operands, *results) if spec is not None]
    if len(layouts) < len(operands) + len(results) or PartitionSpec() in results:
        return None
    return LoopRead(tuple(layouts[: len(operands)]), tuple(layouts[len(operands) :]))


def _layout(
    classes: DimClasses, frame: Frame, atom: Atom, batch_axes: Mapping[str, int]
) -> PartitionSpec | None:
    """Return how samples divide a value; None if it has samples that cannot be divided."""
    if isinstance(atom, Literal):
        return PartitionSpec()
    with_samples = [d for d in frame.dims(atom) if any(a.id in classes.batch for a in d)]
    if not with_samples:
        return PartitionSpec()
    if len(with_samples) > 1:
        return None
    return activation_spec(frame, atom, classes.batch, batch_axes, lambda _: None)


def _is_weight(classes: DimClasses, frame: Frame, atom: Atom) -> bool:
    """Whether a value is computed from trained weights alone, the same for all samples."""
    if isinstance(atom, Literal):
        return False
    value = frame.values[atom]
    has_samples = any(a.id in classes.batch for dim in frame.dims(atom) for a in dim)
    return bool(value.params) and value.has_grad and not value.has_data and not has_samples
