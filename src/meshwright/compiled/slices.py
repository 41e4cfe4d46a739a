"""Values that are used only through slices, and the offsets of these slices on every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.compiled.hlo import Computation, Instruction, Program
from meshwright.compiled.participants import MeshAxes, PerDevice, integers


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
    raise UnknownError(instruction.opcode)


def _at(tuple_instruction: Instruction, index: str) -> str:
    if tuple_instruction.opcode != "tuple":
        raise UnknownError(tuple_instruction.opcode)
    return tuple_instruction.operands[int(index)]


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
