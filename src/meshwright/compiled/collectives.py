"""The collectives of a compiled program: what each sends, over which axes, for which module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from meshwright.compiled.hlo import (
    Computation,
    Instruction,
    Program,
    parse_hlo,
    trip_count,
)
from meshwright.compiled.participants import IRREGULAR, Groups, MeshAxes, parse_replica_groups
from meshwright.compiled.slices import (
    REARRANGES,
    ElidedError,
    Scope,
    UnknownError,
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

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute`` (rarely ``ragged-all-to-all`` or ``collective-broadcast``).
        axes: the mesh axes it runs over, or ``IRREGULAR``.
        group_size: devices that take part in one exchange.
        count: how often one run of the program does it, loops multiplied in.
        count_is_known: False inside a loop of unknown length (counted once) or a conditional
            (the branch that sends most is counted).
        payload_bytes: the whole logical value, once: an all-gather's output, a reduce-scatter's
            input, what one device holds for the others.
        dtype: XLA's name of the element type.
        module: path of the module it belongs to; empty when outside every module.
        phase: a guess from the op name.
        name: the HLO instruction.
        op_name: where it comes from in the traced program.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    count_is_known: bool
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

    Give it ``CompiledProgram.partitioned`` for bytes, dtypes and modules; it reads optimized text
    as well, where combined collectives come out one by one. An all-reduce of which every device
    only keeps its own slice is a reduce-scatter written by a compiler that has none: it is listed
    as one, over the axes that slice it, with an all-reduce of the slice over the others. Partial
    sums of one value that are reduced one by one and then added are listed as one reduction, which
    is what the GPU compiler makes of them (benchmarks/results/gpu_reductions.json).
    """
    program = parse_hlo(hlo_text)
    sizes = tuple(mesh_axes.values())
    if program.num_partitions not in (1, math.prod(sizes)):
        raise UserError(
            f"the program is for {program.num_partitions} devices, the mesh for {math.prod(sizes)}",
            fix="give the axes of the mesh it was compiled for",
        )
    return _Reader(program, MeshAxes(tuple(mesh_axes), sizes)).read(Scope(program.entry), 1, True)


def phase_of(op_name: str) -> Phase:
    """Guess the part of a training step: differentiation leaves its name on what it traces."""
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name or module_of(op_name) else "update"


@dataclass(frozen=True)
class _Exchanged:
    """One value that a collective instruction exchanges; a combined one has several."""

    position: int | None
    dtype: str
    bytes: int
    op_name: str


@dataclass(frozen=True)
class _Reader:
    """Walks a program from its entry and collects collectives."""

    program: Program
    mesh: MeshAxes

    def read(self, scope: Scope, count: int, known: bool) -> list[Collective]:
        found: list[Collective] = []
        sums = merged_sums(scope.computation, self._participants)
        for instruction in scope.computation.instructions:
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in _SENT:
                total = sums.get(instruction.name, instruction)
                if total is not None:
                    found += self._collectives(scope, instruction, total, count, known)
            elif opcode == "while":
                trips = trip_count(self.program, scope.computation, instruction)
                times = count * (1 if trips is None else trips)
                for part in self.program.called_by(instruction, "condition", "body"):
                    inner = Scope(part, scope, instruction)
                    found += self.read(inner, times, known and trips is not None)
            elif opcode == "conditional":
                found += self._heaviest_branch(scope, instruction, count)
            elif opcode in ("call", "fusion", "async-start"):
                for part in self.program.called_by(instruction, "to_apply", "calls"):
                    found += self.read(Scope(part, scope, instruction), count, known)
        return found

    def _heaviest_branch(
        self, scope: Scope, instruction: Instruction, count: int
    ) -> list[Collective]:
        roles = ("branch_computations", "true_computation", "false_computation")
        branches = self.program.called_by(instruction, *roles)
        lists = [self.read(Scope(part, scope, instruction), count, False) for part in branches]
        return max(lists, key=lambda found: sum(c.sent_bytes for c in found), default=[])

    def _collectives(
        self, scope: Scope, instruction: Instruction, total: Instruction, count: int, known: bool
    ) -> list[Collective]:
        """One collective per operand, so that combined ones keep their bytes and modules.

        ``total`` is where its result is complete: itself, or the sum it is a part of.
        """
        kind = instruction.opcode.removesuffix("-start")
        axes, groups = self._participants(instruction)
        size = len(groups[0]) if axes == IRREGULAR else self.mesh.size(axes)
        if size == 1:
            return []
        found: list[Collective] = []
        for value in _exchanged(scope.computation, instruction, kind):
            payload = value.bytes * size if kind == "all-gather" else value.bytes
            parts = [(kind, axes, size, payload)]
            if kind == "all-reduce":
                scatter = self._scatter_axes(scope, total, value.position, axes, groups)
                parts = self._as_scatter(axes, size, payload, scatter)
            found += [
                Collective(
                    kind=part,
                    axes=over,
                    group_size=among,
                    count=count,
                    count_is_known=known,
                    payload_bytes=held,
                    dtype=value.dtype,
                    module=module_of(value.op_name),
                    phase=phase_of(value.op_name),
                    name=instruction.name,
                    op_name=value.op_name,
                )
                for part, over, among, held in parts
            ]
        return found

    def _participants(self, instruction: Instruction) -> tuple[tuple[str, ...], Groups]:
        if pairs := instruction.attributes.get("source_target_pairs"):
            groups = parse_replica_groups(pairs, self.mesh.num_devices)
            return self.mesh.moved(groups), groups
        text = instruction.attributes.get("replica_groups", "")
        if "device_ids" in instruction.attributes:
            # The named notation has a comma of its own, at which attributes are split.
            text += ", device_ids=" + instruction.attributes["device_ids"]
        groups = parse_replica_groups(text, self.mesh.num_devices)
        return self.mesh.spanned(groups), groups

    def _as_scatter(
        self, axes: tuple[str, ...], size: int, payload: int, scatter: tuple[str, ...]
    ) -> list[tuple[str, tuple[str, ...], int, int]]:
        """The kinds an all-reduce counts as when its result is sliced over ``scatter``."""
        if not scatter:
            return [("all-reduce", axes, size, payload)]
        if scatter == axes:
            return [("reduce-scatter", axes, size, payload)]
        share = self.mesh.size(scatter)
        rest = tuple(axis for axis in axes if axis not in scatter)
        return [
            ("reduce-scatter", scatter, share, payload),
            ("all-reduce", rest, size // share, payload // share),
        ]

    def _scatter_axes(
        self,
        scope: Scope,
        instruction: Instruction,
        position: int | None,
        axes: tuple[str, ...],
        groups: Groups,
    ) -> tuple[str, ...]:
        """The axes over which every use of an all-reduce's result takes only its own slice."""
        starts = [instruction]
        if position is not None:
            starts = _readers_of(scope.computation, instruction, position)
        choices: set[tuple[str, ...]] = set()
        for start in starts:
            slices = slices_of(self.program, scope, start)
            if slices is None:
                return ()
            choices |= {self._sliced_over(where, cut, axes, groups) for where, cut in slices}
        return choices.pop() if len(choices) == 1 else ()

    def _sliced_over(
        self, scope: Scope, cut: Instruction, axes: tuple[str, ...], groups: Groups
    ) -> tuple[str, ...]:
        """The axes whose devices take different slices that together are the whole."""
        whole = scope.computation.by_name[cut.operands[0]].shape.size
        parts = whole // cut.shape.size
        if parts == 1:
            return ()
        try:
            offsets = [
                value_on_devices(self.program, scope, o, self.mesh) for o in cut.operands[1:]
            ]
        except ElidedError:
            return self._axes_of_size(axes, parts, groups)
        except UnknownError:
            return ()
        per_device = [np.broadcast_to(o.reshape(-1), self.mesh.num_devices) for o in offsets]
        where = list(zip(*(o.tolist() for o in per_device), strict=True))
        if parts == len(groups[0]) and all(len({where[i] for i in g}) == parts for g in groups):
            return axes
        sliced = {axis for o in per_device for axis in self.mesh.varying(o)}
        chosen = tuple(axis for axis in axes if axis in sliced)
        if axes == IRREGULAR or not sliced <= set(axes):
            return ()
        return chosen if self.mesh.size(chosen) == parts == len(set(where)) else ()

    def _axes_of_size(self, axes: tuple[str, ...], size: int, groups: Groups) -> tuple[str, ...]:
        """The only choice among ``axes`` with ``size`` devices, for text without offset tables."""
        if size == len(groups[0]):
            return axes
        if axes == IRREGULAR:
            return ()
        subsets = [s for n in range(1, len(axes)) for s in combinations(axes, n)]
        fitting = [subset for subset in subsets if self.mesh.size(subset) == size]
        return fitting[0] if len(fitting) == 1 else ()


def _exchanged(
    computation: Computation, instruction: Instruction, kind: str
) -> Iterable[_Exchanged]:
    """The values a collective exchanges, sized by its operands.

    Results differ between plain, async and combined forms; operands do not.
    """
    producers = [computation.by_name[operand] for operand in instruction.operands]
    own = instruction.op_name
    if kind.endswith("all-to-all"):
        # Several operands are the pieces of one value (ragged: the data, then offsets and sizes).
        pieces = producers[:1] if kind.startswith("ragged") else producers
        size = sum(piece.shape.bytes for piece in pieces)
        return [_Exchanged(None, pieces[0].shape.dtype, size, own or pieces[0].op_name)]
    if kind == "all-gather" and not module_of(own):
        own = _purpose(computation, instruction) or own
    if len(producers) == 1:
        shape = producers[0].shape
        return [_Exchanged(None, shape.dtype, shape.bytes, own or producers[0].op_name)]
    # A combined collective carries one op name, or a blend of all; each producer has its own.
    return [
        _Exchanged(position, producer.shape.dtype, producer.shape.bytes, producer.op_name or own)
        for position, producer in enumerate(producers)
    ]


def _purpose(computation: Computation, gather: Instruction) -> str:
    """The op name of the module that a gathered value is for.

    Newer compilers name a gather after what it gathers, which for a weight is outside modules.
    """
    for user in computation.users[gather.name]:
        if module_of(user.op_name):
            return user.op_name
        passes_on = user.opcode in (*REARRANGES, "all-gather-done", "get-tuple-element")
        if passes_on and (found := _purpose(computation, user)):
            return found
    return ""


def _readers_of(
    computation: Computation, instruction: Instruction, position: int
) -> list[Instruction]:
    """What reads element ``position`` of a tuple (through the ``-done`` of an async one)."""
    found: list[Instruction] = []
    for user in computation.users[instruction.name]:
        if user.opcode == "get-tuple-element":
            found += [user] if int(user.attributes["index"]) == position else []
        elif user.opcode.endswith("-done"):
            found += _readers_of(computation, user, position)
        else:
            return [instruction]
    return found


def merged_sums(
    computation: Computation, participants: Callable[[Instruction], object]
) -> dict[str, Instruction | None]:
    """Find all-reduces over the same devices whose results are only added to each other.

    Returns, by name, the sum for the first all-reduce of each such group and None for the others;
    all-reduces that stand alone are left out.
    """
    merged: dict[str, Instruction | None] = {}
    inside: set[str] = set()
    for instruction in reversed(computation.instructions):
        if instruction.opcode != "add" or instruction.name in inside:
            continue
        parts = _parts_of_sum(computation, instruction, inside)
        if parts is None or len({(part.shape, participants(part)) for part in parts}) > 1:
            continue
        first, *others = parts
        merged[first.name] = instruction
        merged |= dict.fromkeys((part.name for part in others), None)
    return merged


def _parts_of_sum(
    computation: Computation, total: Instruction, inside: set[str]
) -> list[Instruction] | None:
    """The all-reduces a sum consists of; None if it has another part or one is used elsewhere."""
    parts: list[Instruction] = []
    for name in total.operands:
        part = computation.by_name[name]
        if len(computation.users[name]) != 1 or part.is_root:
            return None
        while part.opcode == "copy":
            part = computation.by_name[part.operands[0]]
            if len(computation.users[part.name]) != 1:
                return None
        if part.opcode == "all-reduce" and len(part.operands) == 1:
            parts.append(part)
        elif part.opcode == "add" and (found := _parts_of_sum(computation, part, inside)):
            inside.add(name)
            parts += found
        else:
            return None
    return parts
