"""The collectives of a compiled program: what each sends, over which axes, for which module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np

from meshwright.errors import UserError
from meshwright.program.hlo import (
    Computation,
    Instruction,
    Program,
    parse_hlo,
    trip_count,
)
from meshwright.program.names import module_of

Phase = Literal["forward", "backward", "update"]
Groups = tuple[tuple[int, ...], ...]
PerDevice = np.ndarray[Any, np.dtype[Any]]
"""A value on every device: the first dim is the device, or 1 where all devices agree."""

IRREGULAR = ("?",)
"""The axes of a collective whose groups of devices are no product of mesh axes."""

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
    as one, over the axes that slice it, with an all-reduce of the slice over the others.
    """
    program = parse_hlo(hlo_text)
    sizes = tuple(mesh_axes.values())
    if program.num_partitions not in (1, math.prod(sizes)):
        raise UserError(
            f"the program is for {program.num_partitions} devices, the mesh for {math.prod(sizes)}",
            fix="give the axes of the mesh it was compiled for",
        )
    return _Reader(program, _Axes(tuple(mesh_axes), sizes)).read(_Scope(program.entry), 1, True)


def sent_by_axes(collectives: Iterable[Collective]) -> dict[tuple[str, ...], float]:
    """Bytes each device sends, added up by the axes they run over."""
    total: dict[tuple[str, ...], float] = {}
    for collective in collectives:
        total[collective.axes] = total.get(collective.axes, 0.0) + collective.sent_bytes
    return total


def phase_of(op_name: str) -> Phase:
    """Guess the part of a training step: differentiation leaves its name on what it traces."""
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name or module_of(op_name) else "update"


@lru_cache(maxsize=4096)
def parse_replica_groups(text: str, num_devices: int) -> Groups:
    """Read groups of device ids in any of XLA's three notations; empty means all devices.

    Explicit ``{{0,1},{2,3}}``; iota ``[2,4]<=[4,2]T(1,0)``; named
    ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b','a':(1)2}``.
    """
    text = text.strip()
    if text in ("", "{}"):
        return (tuple(range(num_devices)),)
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("{"):
        return tuple(_integers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
    shape, _, iota = text.partition("<=")
    return _rows(_iota(iota).reshape(_integers(shape)))


def _mesh_groups(text: str) -> Groups:
    """Groups along named axes of a mesh that XLA made up; ``'a':(p)s`` is a part of an axis."""
    declared = re.search(r"mesh\[([^\]]*)\]", text)
    chosen = re.search(r"\{([^{}]*)\}\s*$", text)
    assert declared, f"unknown replica groups: {text}"
    assert chosen, f"unknown replica groups: {text}"
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", declared[1])}
    refs = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", chosen[1])
    ]
    factors: list[tuple[str, int, int]] = []
    for name, full in sizes.items():
        parts = [(pre, size) for ref, pre, size in refs if ref == name]
        cuts = sorted({1, full, *(p for p, _ in parts), *(p * s for p, s in parts)})
        factors += [(name, pre, after // pre) for pre, after in pairwise(cuts)] or [(name, 1, 1)]
    ids = re.search(r"device_ids=\((.*)\)\s*\{", text)
    devices = _device_ids(ids[1]) if ids else np.arange(math.prod(sizes.values()))
    grid = devices.reshape([size for _, _, size in factors])
    last = [factors.index(ref) for ref in refs]
    order = [i for i in range(len(factors)) if i not in last] + last
    return _rows(grid.transpose(order).reshape(-1, math.prod(size for _, _, size in refs)))


def _device_ids(text: str) -> PerDevice:
    return _iota(text) if text.startswith("[") else np.array(_integers(text))


def _iota(text: str) -> PerDevice:
    """Device ids 0, 1, … reshaped and transposed: ``[4,2]T(1,0)``."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return (ids.transpose(_integers(order)) if order else ids).reshape(-1)


def _rows(grid: PerDevice) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


@dataclass(frozen=True)
class _Axes:
    """The mesh: names and sizes, with device ids row-major."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def varying(self, values: PerDevice) -> tuple[str, ...]:
        """The axes along which per-device values differ."""
        grid = np.broadcast_to(values, self.num_devices).reshape(self.sizes)
        return tuple(
            name for i, name in enumerate(self.names) if (grid != grid.take([0], axis=i)).any()
        )

    def spanned(self, groups: Groups) -> tuple[str, ...]:
        """The axes that the groups run over; IRREGULAR when they are no product of axes."""
        if max(map(max, groups)) >= self.num_devices:
            return IRREGULAR
        ids = np.arange(self.num_devices).reshape(self.sizes)
        coordinates = np.array(np.unravel_index(np.array(groups[0]), self.sizes))
        axes = [i for i, row in enumerate(coordinates) if len(set(row.tolist())) > 1]
        others = [i for i in range(len(self.names)) if i not in axes]
        size = math.prod(self.sizes[i] for i in axes)
        expected = _rows(ids.transpose(others + axes).reshape(-1, size))
        same = {frozenset(group) for group in groups} == {frozenset(group) for group in expected}
        return tuple(self.names[i] for i in axes) if same else IRREGULAR

    def moved(self, pairs: Groups) -> tuple[str, ...]:
        """The axes along which (source, target) pairs of a permute move data."""
        source, target = np.array(pairs).T
        if max(source.max(), target.max()) >= self.num_devices:
            return IRREGULAR
        steps = zip(
            np.unravel_index(source, self.sizes), np.unravel_index(target, self.sizes), strict=True
        )
        moves = [bool((start != end).any()) for start, end in steps]
        return tuple(name for name, moved in zip(self.names, moves, strict=True) if moved)


@dataclass(frozen=True)
class _Scope:
    """A computation as called from one place, so that its parameters have values."""

    computation: Computation
    caller: _Scope | None = None
    call: Instruction | None = None


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
    mesh: _Axes

    def read(self, scope: _Scope, count: int, known: bool) -> list[Collective]:
        found: list[Collective] = []
        for instruction in scope.computation.instructions:
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in _SENT:
                found += self._collectives(scope, instruction, count, known)
            elif opcode == "while":
                trips = trip_count(self.program, scope.computation, instruction)
                times = count * (1 if trips is None else trips)
                for part in self.program.called_by(instruction, "condition", "body"):
                    inner = _Scope(part, scope, instruction)
                    found += self.read(inner, times, known and trips is not None)
            elif opcode == "conditional":
                found += self._heaviest_branch(scope, instruction, count)
            elif opcode in ("call", "fusion", "async-start"):
                for part in self.program.called_by(instruction, "to_apply", "calls"):
                    found += self.read(_Scope(part, scope, instruction), count, known)
        return found

    def _heaviest_branch(
        self, scope: _Scope, instruction: Instruction, count: int
    ) -> list[Collective]:
        roles = ("branch_computations", "true_computation", "false_computation")
        branches = self.program.called_by(instruction, *roles)
        lists = [self.read(_Scope(part, scope, instruction), count, False) for part in branches]
        return max(lists, key=lambda found: sum(c.sent_bytes for c in found), default=[])

    def _collectives(
        self, scope: _Scope, instruction: Instruction, count: int, known: bool
    ) -> list[Collective]:
        """One collective per operand, so that combined ones keep their bytes and modules."""
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
                scatter = self._scatter_axes(scope, instruction, value.position, axes, groups)
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
        scope: _Scope,
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
            slices = _slices_of(self.program, scope, start)
            if slices is None:
                return ()
            choices |= {self._sliced_over(where, cut, axes, groups) for where, cut in slices}
        return choices.pop() if len(choices) == 1 else ()

    def _sliced_over(
        self, scope: _Scope, cut: Instruction, axes: tuple[str, ...], groups: Groups
    ) -> tuple[str, ...]:
        """The axes whose devices take different slices that together are the whole."""
        whole = scope.computation.by_name[cut.operands[0]].shape.size
        parts = whole // cut.shape.size
        if parts == 1:
            return ()
        try:
            offsets = [_value(self.program, scope, o, self.mesh) for o in cut.operands[1:]]
        except _ElidedError:
            return self._axes_of_size(axes, parts, groups)
        except _UnknownError:
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
        passes_on = user.opcode in (*_REARRANGES, "all-gather-done", "get-tuple-element")
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


_REARRANGES = ("bitcast", "reshape", "copy", "convert", "transpose", "all-reduce-done")


def _slices_of(
    program: Program, scope: _Scope, value: Instruction
) -> list[tuple[_Scope, Instruction]] | None:
    """The dynamic slices through which alone a value is used; None when it is used otherwise."""
    found: list[tuple[_Scope, Instruction]] = []
    further: list[tuple[_Scope, Instruction]] = []
    if value.is_root:
        if not (scope.caller and scope.call and scope.call.opcode in ("fusion", "call")):
            return None
        further.append((scope.caller, scope.call))
    for user in scope.computation.users[value.name]:
        if user.opcode == "dynamic-slice" and value.name not in user.operands[1:]:
            found.append((scope, user))
        elif user.opcode in _REARRANGES:
            further.append((scope, user))
        elif user.opcode in ("fusion", "call"):
            (inner,) = program.called_by(user, "calls", "to_apply")
            inside = _Scope(inner, scope, user)
            places = [i for i, operand in enumerate(user.operands) if operand == value.name]
            further += [(inside, inner.parameters[place]) for place in places]
        else:
            return None
    for where, use in further:
        slices = _slices_of(program, where, use)
        if slices is None:
            return None
        found += slices
    return found


class _UnknownError(Exception):
    """The value of an instruction cannot be computed here."""


class _ElidedError(_UnknownError):
    """A constant's digits are left out of the text."""


_ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.floor_divide,
    "remainder": np.remainder,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "shift-right-logical": np.right_shift,
}


def _value(program: Program, scope: _Scope, name: str, mesh: _Axes) -> PerDevice:
    """Compute a small integer on every device: all that the offsets of slices are made of."""
    instruction = scope.computation.by_name[name]
    opcode, dims, operands = instruction.opcode, instruction.shape.dims, instruction.operands

    def of(operand: str) -> PerDevice:
        return _value(program, scope, operand, mesh)

    if opcode == "partition-id":
        return np.arange(mesh.num_devices)
    if opcode == "constant":
        return _constant(instruction)
    if opcode in ("parameter", "get-tuple-element") and scope.caller:
        return _value(program, scope.caller, _passed_in(scope, instruction), mesh)
    if opcode in ("fusion", "call"):
        (inner,) = program.called_by(instruction, "calls", "to_apply")
        return _value(program, _Scope(inner, scope, instruction), inner.root.name, mesh)
    if opcode in ("copy", "convert", "bitcast", "reshape") and instruction.shape.dtype[0] in "su":
        value = of(operands[0])
        return value.reshape(value.shape[0], *dims)
    if opcode == "broadcast" and (value := of(operands[0])).ndim == 1:
        return np.broadcast_to(value.reshape(-1, *(1,) * len(dims)), (value.shape[0], *dims))
    if opcode == "clamp":
        return np.clip(of(operands[1]), of(operands[0]), of(operands[2]))
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](of(operands[0]), of(operands[1]))
    if opcode == "dynamic-slice" and len(dims) == 1:
        return _look_up(of(operands[0]), of(operands[1]), dims[0])
    raise _UnknownError(opcode)


def _passed_in(scope: _Scope, instruction: Instruction) -> str:
    """The caller's name for what a parameter, or an unchanging part of a loop's state, holds."""
    call, caller = scope.call, scope.caller
    if call and instruction.opcode == "parameter" and call.opcode in ("fusion", "call"):
        return call.operands[int(instruction.literal)]
    if call and caller and instruction.opcode == "get-tuple-element" and call.opcode == "while":
        state = scope.computation.by_name[instruction.operands[0]]
        start = caller.computation.by_name[call.operands[0]]
        index = instruction.attributes["index"]
        passed_on = scope.computation.by_name.get(_at(scope.computation.root, index))
        if (
            state.opcode == "parameter"
            and passed_on
            and passed_on.operands == instruction.operands
            and passed_on.attributes.get("index") == index
        ):
            return _at(start, index)
    raise _UnknownError(instruction.opcode)


def _at(tuple_instruction: Instruction, index: str) -> str:
    if tuple_instruction.opcode != "tuple":
        raise _UnknownError(tuple_instruction.opcode)
    return tuple_instruction.operands[int(index)]


def _constant(instruction: Instruction) -> PerDevice:
    if "..." in instruction.literal:
        raise _ElidedError
    if instruction.shape.dtype[0] not in "su" or len(instruction.shape.dims) > 1:
        raise _UnknownError("constant")
    return np.array(_integers(instruction.literal)).reshape(1, *instruction.shape.dims)


def _look_up(table: PerDevice, start: PerDevice, size: int) -> PerDevice:
    """Entries ``start`` to ``start + size`` of a table, clamped into it as XLA does."""
    first = np.clip(start.reshape(-1, 1), 0, table.shape[1] - size)
    rows = np.broadcast_to(table, (max(len(table), len(first)), table.shape[1]))
    return np.take_along_axis(rows, first + np.arange(size), axis=1)
