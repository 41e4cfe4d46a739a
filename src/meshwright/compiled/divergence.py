"""Collective-permutes that some devices may reach later than others, or never."""

from collections.abc import Iterator, Mapping

from meshwright.compiled.hlo import Computation, Instruction, Program, parse_hlo, trip_count
from meshwright.compiled.participants import MeshAxes, parse_replica_groups


def divergent_permutes(hlo_text: str, mesh_axes: Mapping[str, int], axis: str) -> list[str]:
    """Return the op names of permutes that some devices may not reach, except those along ``axis``.

    In a collective-permute all devices of a program wait for each other, including those that send
    nothing. Devices at different positions along ``axis`` take different branches.
    """
    program = parse_hlo(hlo_text)
    mesh = MeshAxes(tuple(mesh_axes), tuple(mesh_axes.values()))
    permutes: dict[str, None] = {}
    for instruction in _divergent(program, program.entry, inside=False):
        if instruction.opcode.removesuffix("-start") != "collective-permute":
            continue
        pairs = instruction.attributes.get("source_target_pairs", "")
        if axis not in mesh.moved(parse_replica_groups(pairs, mesh.num_devices)):
            permutes[instruction.op_name] = None
    return list(permutes)


def _divergent(
    program: Program, computation: Computation, *, inside: bool
) -> Iterator[Instruction]:
    """Yield the instructions in branches and loops of unknown length."""
    for instruction in computation.instructions:
        if inside:
            yield instruction
        loops = instruction.opcode == "while"
        endless = loops and trip_count(program, computation, instruction) is None
        diverges = inside or endless or instruction.opcode == "conditional"
        for called in program.run_by(instruction):
            yield from _divergent(program, called, inside=diverges)
