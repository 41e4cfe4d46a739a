"""The collectives of a compiled program: what each sends, over which axes, for which module."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Literal

import numpy as np

from meshwright.compiled.hlo import Computation, Instruction, Program, parse_hlo, trip_count
from meshwright.compiled.participants import (
    IRREGULAR,
    REARRANGES,
    ElidedError,
    Groups,
    MeshAxes,
    Scope,
    UnknownError,
    parse_replica_groups,
    slices_of,
    value_on_devices,
)
from meshwright.errors import UserError
from meshwright.program.jaxpr.names import module_of

Phase = Literal["forward", "backward", "update"]
# Bytes each device sends in a ring, as a multiple of the payload, for groups of n.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One value that devices exchange.

    ``axes`` may be ``IRREGULAR``. ``count`` is how often it runs in one run of the program,
    iterations of loops included; a loop of unknown length counts once, and of a conditional the
    branch that sends most. The payload is the whole logical value: an all-gather's output, a
    reduce-scatter's input, what one device sends in an all-to-all or a permute. The phase is a
    guess from the op name, which says where it comes from in the traced program.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    dtype: str
    module: str
    phase: Phase
    name: str
    op_name: str

    @property
    def sent_bytes(self) -> float:
        """Bytes each device sends in one run of the program, by the ring algorithm."""
        return self.count * ring_bytes(self.kind, self.payload_bytes, self.group_size)


def ring_bytes(kind: str, payload_bytes: float, group_size: int) -> float:
    """Bytes each device sends for one collective, by the ring algorithm."""
    return _SENT[kind](group_size) * payload_bytes


def read_collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[Collective]:
    """List the collectives of a program partitioned over ``mesh_axes`` (ordered, row-major ids).

    Bytes, dtypes and modules are exact for ``CompiledProgram.partitioned``. Optimized text works
    too; its combined collectives are listed one by one. Compilers without a reduce-scatter write an
    all-reduce of which every device keeps only its own slice: it is listed as a reduce-scatter over
    the axes that slice it, plus an all-reduce of the slice over the other axes. Partial sums that
    are reduced one by one and then added are listed as one reduction, because the GPU compiler
    merges them (benchmarks/results/gpu_reductions.json). It also joins, and so do we, what is
    reduced over some axes and then over others.
    """
    return collectives_of(parse_hlo(hlo_text), mesh_axes)


def collectives_of(program: Program, mesh_axes: Mapping[str, int]) -> list[Collective]:
    """List the collectives of a program that was parsed already, as `read_collectives` does."""
    sizes = tuple(mesh_axes.values())
    if program.num_partitions not in (1, math.prod(sizes)):
        raise UserError(
            f"the program is for {program.num_partitions} devices, the mesh for {math.prod(sizes)}",
            fix="pass the axes of the mesh it was compiled for",
        )
    return _Reader(program, MeshAxes(tuple(mesh_axes), sizes)).read(Scope(program.entry), 1)


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or starts one."""
    return instruction.opcode.removesuffix("-start") in _SENT


def phase_of(op_name: str) -> Phase:
    """Guess the phase of a training step from the marks differentiation leaves in op names."""
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name or module_of(op_name) else "update"


@dataclass(frozen=True)
class _ExchangedValue:
    """One value that a collective instruction exchanges; a combined collective has several."""

    position: int | None
    dtype: str
    bytes: int
    op_name: str


@dataclass(frozen=True)
class _Reader:
    """Walks a program from its entry and collects collectives."""

    program: Program
    mesh: MeshAxes

    def read(self, scope: Scope, count: int) -> list[Collective]:
        """List the collectives of a computation that runs ``count`` times."""
        collectives: list[Collective] = []
        sums = merged_sums(scope.computation, self._participants)
        for instruction in scope.computation.instructions:
            if is_collective(instruction):
                result = sums.get(instruction.name, instruction)
                if result is not None:
                    collectives += self._collectives(scope, instruction, result, count)
                continue
            times = count
            if instruction.opcode == "while":
                trips = trip_count(self.program, scope.computation, instruction)
                times = count if trips is None else count * trips
            called = self.program.run_by(instruction)
            inside = [self.read(Scope(inner, scope, instruction), times) for inner in called]
            if instruction.opcode == "conditional":
                inside = [max(inside, key=lambda part: sum(c.sent_bytes for c in part), default=[])]
            collectives += chain.from_iterable(inside)
        return self._joined(scope.computation, collectives)

    def _joined(self, computation: Computation, found: list[Collective]) -> list[Collective]:
        """Join each all-reduce of what was reduced over other axes before with that one."""
        whole = {c.name: c for c in found if c.kind == "all-reduce"}
        for instruction in computation.instructions:
            outer = whole.get(instruction.name)
            inner = whole.get(instruction.operands[0]) if instruction.operands else None
            if outer is None or inner is None or len(computation.users[inner.name]) > 1:
                continue
            both = {*outer.axes, *inner.axes}
            axes = tuple(axis for axis in self.mesh.names if axis in both)
            parts = sum(c.name in (inner.name, outer.name) for c in found)
            if len(axes) == len(outer.axes) + len(inner.axes) and parts == 2:
                joined = replace(outer, axes=axes, group_size=self.mesh.size(axes))
                found = [joined if c is outer else c for c in found if c is not inner]
                whole[outer.name] = joined
        return found

    def _collectives(
        self, scope: Scope, instruction: Instruction, result: Instruction, count: int
    ) -> list[Collective]:
        """Return one collective per operand, each with its own bytes and module.

        ``result`` holds the complete value: the instruction itself, or the sum it is a term of.
        """
        kind = instruction.opcode.removesuffix("-start")
        axes, groups = self._participants(instruction)
        size = len(groups[0]) if axes == IRREGULAR else self.mesh.size(axes)
        if size == 1:
            return []
        collectives: list[Collective] = []
        for value in _exchanged_values(scope.computation, instruction, kind):
            collective = Collective(
                kind=kind,
                axes=axes,
                group_size=size,
                count=count,
                payload_bytes=value.bytes * size if kind == "all-gather" else value.bytes,
                dtype=value.dtype,
                module=module_of(value.op_name),
                phase=phase_of(value.op_name),
                name=instruction.name,
                op_name=value.op_name,
            )
            scatter: tuple[str, ...] = ()
            if kind == "all-reduce":
                scatter = self._scatter_axes(scope, result, value.position, axes, groups)
            collectives += self._as_scatter(collective, scatter)
        return collectives

    def _participants(self, instruction: Instruction) -> tuple[tuple[str, ...], Groups]:
        if pairs := instruction.attributes.get("source_target_pairs"):
            groups = parse_replica_groups(pairs, self.mesh.num_devices)
            return self.mesh.moved(groups), groups
        text = instruction.attributes.get("replica_groups", "")
        if "device_ids" in instruction.attributes:
            # The named notation contains a comma, at which attributes were split.
            text += ", device_ids=" + instruction.attributes["device_ids"]
        groups = parse_replica_groups(text, self.mesh.num_devices)
        return self.mesh.spanned(groups), groups

    def _as_scatter(self, whole: Collective, scatter: tuple[str, ...]) -> Iterator[Collective]:
        """Yield what an all-reduce counts as if its result is sliced over ``scatter``."""
        rest = tuple(axis for axis in whole.axes if axis not in scatter)
        if not scatter:
            yield whole
            return
        share = whole.group_size if not rest else self.mesh.size(scatter)
        yield replace(whole, kind="reduce-scatter", axes=scatter, group_size=share)
        if rest:
            size, payload = whole.group_size // share, whole.payload_bytes // share
            yield replace(whole, axes=rest, group_size=size, payload_bytes=payload)

    def _scatter_axes(
        self,
        scope: Scope,
        instruction: Instruction,
        position: int | None,
        axes: tuple[str, ...],
        groups: Groups,
    ) -> tuple[str, ...]:
        """Return the axes over which every use of an all-reduce takes only the device's slice."""
        starts = [instruction]
        if position is not None:
            starts = _readers_of(scope.computation, instruction, position)
        choices: set[tuple[str, ...]] = set()
        for start in starts:
            slices = slices_of(self.program, scope, start)
            if slices is None:
                return ()
            choices |= {self._sliced_over(inner, part, axes, groups) for inner, part in slices}
        return choices.pop() if len(choices) == 1 else ()

    def _sliced_over(
        self, scope: Scope, part: Instruction, axes: tuple[str, ...], groups: Groups
    ) -> tuple[str, ...]:
        """Return the axes whose devices take different slices that together are the whole value."""
        whole = scope.computation.by_name[part.operands[0]].shape.size
        num_parts = whole // part.shape.size
        if num_parts == 1:
            return ()
        try:
            offsets = [
                value_on_devices(self.program, scope, o, self.mesh) for o in part.operands[1:]
            ]
        except ElidedError:
            return self._axes_of_size(axes, num_parts, groups)
        except UnknownError:
            return ()
        per_device = [np.broadcast_to(o.reshape(-1), self.mesh.num_devices) for o in offsets]
        starts = list(zip(*(o.tolist() for o in per_device), strict=True))
        if num_parts == len(groups[0]) and all(
            len({starts[device] for device in group}) == num_parts for group in groups
        ):
            return axes
        sliced = {axis for o in per_device for axis in self.mesh.varying(o)}
        chosen = tuple(axis for axis in axes if axis in sliced)
        if axes == IRREGULAR or not sliced <= set(axes):
            return ()
        return chosen if self.mesh.size(chosen) == num_parts == len(set(starts)) else ()

    def _axes_of_size(self, axes: tuple[str, ...], size: int, groups: Groups) -> tuple[str, ...]:
        """Return the one choice of axes with ``size`` devices, for text without offset tables."""
        if size == len(groups[0]):
            return axes
        if axes == IRREGULAR:
            return ()
        subsets = [s for n in range(1, len(axes)) for s in combinations(axes, n)]
        fitting = [subset for subset in subsets if self.mesh.size(subset) == size]
        return fitting[0] if len(fitting) == 1 else ()


def _exchanged_values(
    computation: Computation, instruction: Instruction, kind: str
) -> Iterable[_ExchangedValue]:
    """Return the values a collective exchanges, with the sizes of its operands.

    Unlike results, operands are the same in plain, async and combined collectives.
    """
    producers = [computation.by_name[operand] for operand in instruction.operands]
    op_name = instruction.op_name
    if kind.endswith("all-to-all"):
        # Several operands are the pieces of one value (ragged: the data, then offsets and sizes).
        pieces = producers[:1] if kind.startswith("ragged") else producers
        size = sum(piece.shape.bytes for piece in pieces)
        return [_ExchangedValue(None, pieces[0].shape.dtype, size, op_name or pieces[0].op_name)]
    if kind == "all-gather" and not module_of(op_name):
        op_name = _reader_op_name(computation, instruction) or op_name
    if len(producers) == 1:
        shape = producers[0].shape
        return [_ExchangedValue(None, shape.dtype, shape.bytes, op_name or producers[0].op_name)]
    # A combined collective has one op name, or all of them joined; each producer has its own.
    names = [p.op_name or op_name for p in producers]
    if kind == "all-gather" and not module_of(instruction.op_name):
        names = [
            name if module_of(p.op_name) else _element_op_name(computation, instruction, n) or name
            for n, (p, name) in enumerate(zip(producers, names, strict=True))
        ]
    return [
        _ExchangedValue(position, p.shape.dtype, p.shape.bytes, name)
        for position, (p, name) in enumerate(zip(producers, names, strict=True))
    ]


def _element_op_name(computation: Computation, gather: Instruction, position: int) -> str:
    """Return the op name of the first module that reads one value of a combined gather."""
    readers = _readers_of(computation, gather, position)
    names = (_reader_op_name(computation, r) for r in readers if r is not gather)
    return next(filter(None, names), "")


def _reader_op_name(computation: Computation, gather: Instruction) -> str:
    """Return the op name of the first module that reads a gathered value.

    Newer compilers name a gather after its operand, and a weight belongs to no module.
    """
    for user in computation.users[gather.name]:
        if module_of(user.op_name):
            return user.op_name
        passes_on = user.opcode in (*REARRANGES, "all-gather-done", "get-tuple-element")
        if passes_on and (op_name := _reader_op_name(computation, user)):
            return op_name
    return ""


def _readers_of(
    computation: Computation, instruction: Instruction, position: int
) -> list[Instruction]:
    """Return what reads element ``position`` of a tuple, through the ``-done`` of an async one."""
    readers: list[Instruction] = []
    for user in computation.users[instruction.name]:
        if user.opcode == "get-tuple-element":
            readers += [user] if int(user.attributes["index"]) == position else []
        elif user.opcode.endswith("-done"):
            readers += _readers_of(computation, user, position)
        else:
            return [instruction]
    return readers


def merged_sums(
    computation: Computation, participants: Callable[[Instruction], object]
) -> dict[str, Instruction | None]:
    """Find all-reduces over the same devices whose results are only added to each other.

    Returns:
        by name of the all-reduce, the sum for the first of each such group and None for the rest;
        all-reduces whose results are used in other ways are not included.
    """
    merged: dict[str, Instruction | None] = {}
    nested: set[str] = set()
    for instruction in reversed(computation.instructions):
        if instruction.opcode != "add" or instruction.name in nested:
            continue
        terms = _terms_of_sum(computation, instruction, nested)
        if terms is None or len({(term.shape, participants(term)) for term in terms}) > 1:
            continue
        first, *others = terms
        merged[first.name] = instruction
        merged |= dict.fromkeys((term.name for term in others), None)
    return merged


def _terms_of_sum(
    computation: Computation, total: Instruction, nested: set[str]
) -> list[Instruction] | None:
    """Return the all-reduces a sum adds up; None if it has other terms, or one is used elsewhere.

    Additions inside the sum are added to ``nested``.
    """
    terms: list[Instruction] = []
    for name in total.operands:
        term = computation.by_name[name]
        if len(computation.users[name]) != 1 or term.is_root:
            return None
        while term.opcode == "copy":
            term = computation.by_name[term.operands[0]]
            if len(computation.users[term.name]) != 1:
                return None
        if term.opcode == "all-reduce" and len(term.operands) == 1:
            terms.append(term)
        elif term.opcode == "add" and (inner := _terms_of_sum(computation, term, nested)):
            nested.add(name)
            terms += inner
        else:
            return None
    return terms
