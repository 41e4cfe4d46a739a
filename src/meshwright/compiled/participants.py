"""Which devices take part in a collective, which axes they span, and which slice each one takes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.compiled.hlo import Computation, Instruction, Program, carried_in, carried_index

Groups = tuple[tuple[int, ...], ...]
PerDevice = np.ndarray[Any, np.dtype[Any]]
"""A value on every device: the first dim is the device, or 1 where all devices agree."""

IRREGULAR = ("?",)
"""The axes of a collective whose groups of devices are not a product of mesh axes."""


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
        return tuple(integers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
    shape, _, iota = text.partition("<=")
    return _groups(_iota(iota).reshape(integers(shape)))


def _mesh_groups(text: str) -> Groups:
    """Read groups along axes of a mesh named by XLA; ``'a':(p)s`` is part of an axis."""
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
    devices = np.arange(math.prod(sizes.values()))
    if ids:
        devices = _iota(ids[1]) if ids[1].startswith("[") else np.array(integers(ids[1]))
    grid = devices.reshape([size for _, _, size in factors])
    last = [factors.index(ref) for ref in refs]
    order = [i for i in range(len(factors)) if i not in last] + last
    return _groups(grid.transpose(order).reshape(-1, math.prod(size for _, _, size in refs)))


def _iota(text: str) -> PerDevice:
    """Device ids 0, 1, … reshaped and transposed: ``[4,2]T(1,0)``."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    return (ids.transpose(integers(order)) if order else ids).reshape(-1)


def _groups(grid: PerDevice) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def integers(text: str) -> tuple[int, ...]:
    """Return the integers in a text, in order."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


@dataclass(frozen=True)
class MeshAxes:
    """The mesh: names and sizes, with device ids row-major."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of devices along these axes together."""
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def varying(self, values: PerDevice) -> tuple[str, ...]:
        """Return the axes along which per-device values differ."""
        grid = np.broadcast_to(values, self.num_devices).reshape(self.sizes)
        return tuple(
            name for i, name in enumerate(self.names) if (grid != grid.take([0], axis=i)).any()
        )

    def spanned(self, groups: Groups) -> tuple[str, ...]:
        """Return the axes the groups run over; IRREGULAR if they are not a product of axes."""
        if max(map(max, groups)) >= self.num_devices:
            return IRREGULAR
        ids = np.arange(self.num_devices).reshape(self.sizes)
        coordinates = np.array(np.unravel_index(np.array(groups[0]), self.sizes))
        axes = [i for i, row in enumerate(coordinates) if len(set(row.tolist())) > 1]
        others = [i for i in range(len(self.names)) if i not in axes]
        size = math.prod(self.sizes[i] for i in axes)
        expected = _groups(ids.transpose(others + axes).reshape(-1, size))
        same = {frozenset(group) for group in groups} == {frozenset(group) for group in expected}
        return tuple(self.names[i] for i in axes) if same else IRREGULAR

    def moved(self, pairs: Groups) -> tuple[str, ...]:
        """Return the axes along which (source, target) pairs of a permute move data."""
        source, target = np.array(pairs).T
        if max(source.max(), target.max()) >= self.num_devices:
            return IRREGULAR
        steps = zip(
            np.unravel_index(source, self.sizes), np.unravel_index(target, self.sizes), strict=True
        )
        moves = [bool((start != end).any()) for start, end in steps]
        return tuple(name for name, moved in zip(self.names, moves, strict=True) if moved)


@dataclass(frozen=True)
class Scope:
    """A computation as called from one place, so that its parameters have values."""

    computation: Computation
    caller: Scope | None = None
    call: Instruction | None = None


REARRANGES = ("bitcast", "reshape", "copy", "convert", "transpose", "all-reduce-done")


def slices_of(
    program: Program, scope: Scope, value: Instruction
) -> list[tuple[Scope, Instruction]] | None:
    """Return the dynamic slices of a value; None if it is used in any other way."""
    slices: list[tuple[Scope, Instruction]] = []
    uses: list[tuple[Scope, Instruction]] = []
    if value.is_root:
        if not (scope.caller and scope.call and scope.call.opcode in ("fusion", "call")):
            return None
        uses.append((scope.caller, scope.call))
    for user in scope.computation.users[value.name]:
        if user.opcode == "dynamic-slice" and value.name not in user.operands[1:]:
            slices.append((scope, user))
        elif user.opcode in REARRANGES:
            uses.append((scope, user))
        elif user.opcode in ("fusion", "call"):
            (inner,) = program.called_by(user, "calls", "to_apply")
            inside = Scope(inner, scope, user)
            numbers = [i for i, operand in enumerate(user.operands) if operand == value.name]
            uses += [(inside, inner.parameters[number]) for number in numbers]
        else:
            return None
    for inside, use in uses:
        further = slices_of(program, inside, use)
        if further is None:
            return None
        slices += further
    return slices


class UnknownError(Exception):
    """The value of an instruction cannot be computed here."""


class ElidedError(UnknownError):
    """The text abbreviates a constant."""


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


def value_on_devices(program: Program, scope: Scope, name: str, mesh: MeshAxes) -> PerDevice:
    """Compute a small integer, such as the offset of a slice, on every device."""
    instruction = scope.computation.by_name[name]
    opcode, dims, operands = instruction.opcode, instruction.shape.dims, instruction.operands

    def of(operand: str) -> PerDevice:
        return value_on_devices(program, scope, operand, mesh)

    if opcode == "partition-id":
        return np.arange(mesh.num_devices)
    if opcode == "constant":
        return _constant(instruction)
    if opcode in ("parameter", "get-tuple-element") and scope.caller:
        return value_on_devices(program, scope.caller, _passed_in(scope, instruction), mesh)
    if opcode in ("fusion", "call"):
        (inner,) = program.called_by(instruction, "calls", "to_apply")
        return value_on_devices(program, Scope(inner, scope, instruction), inner.root.name, mesh)
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
    raise UnknownError(opcode)


def _passed_in(scope: Scope, instruction: Instruction) -> str:
    """Return the caller's name for a parameter, or for an element of a loop's state."""
    call, caller = scope.call, scope.caller
    if call and instruction.opcode == "parameter" and call.opcode in ("fusion", "call"):
        return call.operands[int(instruction.literal)]
    if call and caller and call.opcode == "while":
        index = carried_index(scope.computation, instruction.name)
        if name := carried_in(caller.computation, call, scope.computation, index):
            return name
    raise UnknownError(instruction.opcode)


def _constant(instruction: Instruction) -> PerDevice:
    if "..." in instruction.literal:
        raise ElidedError
    if instruction.shape.dtype[0] not in "su" or len(instruction.shape.dims) > 1:
        raise UnknownError("constant")
    return np.array(integers(instruction.literal)).reshape(1, *instruction.shape.dims)


def _look_up(table: PerDevice, start: PerDevice, size: int) -> PerDevice:
    """Return entries ``start`` to ``start + size`` of a table, clamped as XLA does."""
    first = np.clip(start.reshape(-1, 1), 0, table.shape[1] - size)
    tables = np.broadcast_to(table, (max(len(table), len(first)), table.shape[1]))
    return np.take_along_axis(tables, first + np.arange(size), axis=1)
