"""Exchanges that devices may come to at different times, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.compiled.hlo import Computation, Instruction, Program, parse_hlo, trip_count
from meshwright.compiled.participants import MeshAxes, parse_replica_groups
from meshwright.program.jaxpr.names import module_of

_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Exchange:
    """A collective-permute in a branch or in a loop of unknown length.

    Attributes:
        module: path of the module it belongs to; empty when outside every module.
        operation: the operation of the traced program it comes from.
    """

    module: str
    operation: str


def divergent_permutes(hlo_text: str, mesh_axes: Mapping[str, int], axis: str) -> list[Exchange]:
    """Return the permutes that not all devices may come to, other than those along ``axis``.

    All devices of a program wait for each other in a collective-permute, whoever it moves values
    between. Devices at different places of ``axis`` take different branches.
    """
    program = parse_hlo(hlo_text)
    mesh = MeshAxes(tuple(mesh_axes), tuple(mesh_axes.values()))
    found: dict[Exchange, None] = {}
    for instruction in _divergent(program, program.entry, inside=False):
        if instruction.opcode.removesuffix("-start") != "collective-permute":
            continue
        pairs = instruction.attributes.get("source_target_pairs", "")
        groups = parse_replica_groups(pairs, mesh.num_devices)
        if axis not in mesh.moved(groups):
            operation = instruction.op_name.rpartition("/")[2]
            found[Exchange(module_of(instruction.op_name), operation)] = None
    return list(found)


def _divergent(
    program: Program, computation: Computation, *, inside: bool
) -> Iterator[Instruction]:
    """Yield the instructions in branches and loops of unknown length."""
    for instruction in computation.instructions:
        if inside:
            yield instruction
        for called, diverges in _called(program, computation, instruction):
            yield from _divergent(program, called, inside=inside or diverges)


def _called(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, bool]]:
    if instruction.opcode == "while":
        diverges = trip_count(program, computation, instruction) is None
        for part in program.called_by(instruction, "condition", "body"):
            yield part, diverges
    elif instruction.opcode == "conditional":
        for part in program.called_by(instruction, *_BRANCHES):
            yield part, True
    elif instruction.opcode in ("call", "fusion", "async-start"):
        for part in program.called_by(instruction, "to_apply", "calls"):
            yield part, False
