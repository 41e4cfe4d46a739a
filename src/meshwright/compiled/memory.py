"""How much memory a compiled program needs on each device, and its largest values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.compiled.hlo import Computation, Program, Shape, parse_hlo
from meshwright.errors import EnvironmentProblem
from meshwright.program.jaxpr.names import module_of
from meshwright.text.units import human_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per device, by what they are used for.

    Attributes:
        argument: the inputs' shards (state and batch).
        output: the outputs' shards.
        alias: outputs that reuse the memory of a donated input; counted in both of the above.
        temp: everything else, such as activations and gathered weights.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """Bytes needed while the program runs.

        A sum, because the peak that the compiler reports does not include ``temp`` on CPU.
        """
        return self.argument + self.output - self.alias + self.temp


def memory_of(compiled: Any) -> MemoryUse:
    """Read the memory of a compiled computation (what ``lowered.compile()`` returned)."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise EnvironmentProblem(
            "this backend does not report the memory of compiled programs",
            fix="compile the same plan on virtual CPU devices, which do: simulate=N",
        )
    return MemoryUse(
        argument=int(stats.argument_size_in_bytes),
        output=int(stats.output_size_in_bytes),
        alias=int(stats.alias_size_in_bytes),
        temp=int(stats.temp_size_in_bytes),
    )


_NO_BUFFER = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
}
"""Operations whose value is a part of another value."""


@dataclass(frozen=True, order=True)
class LargeBuffer:
    """A kind of value that a program keeps in memory.

    Attributes:
        bytes: the size of each.
        count: how many values of this kind the program computes; some may share memory.
        module: the module that computes it, blocks of a list as ``*``; empty outside modules.
        shape: its type and dims, such as ``f32[8,1024,50304]``.
    """

    bytes: int
    count: int
    module: str
    shape: str

    def __str__(self) -> str:
        times = f"{self.count} × " if self.count > 1 else ""
        where = f"in `{self.module}`" if self.module else "outside modules"
        return f"{times}{human_bytes(self.bytes)} {self.shape} {where}"


def largest_buffers(text: str, most: int = 5) -> list[LargeBuffer]:
    """Return the kinds of values of an optimized program that are largest, the largest first.

    Arguments are left out, and so are results, which take the place of donated arguments.
    """
    program = parse_hlo(text)
    results = set(program.entry.root.operands)
    kinds = Counter[tuple[int, str, str]]()
    for computation in _run(program, program.entry):
        for instruction in computation.instructions:
            if instruction.opcode in _NO_BUFFER:
                continue
            if computation is program.entry and instruction.name in results:
                continue
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_of(instruction.op_name))
            for shape in _arrays(instruction.shape):
                kinds[shape.bytes, module, _describe(shape)] += 1
    ordered = sorted(kinds.items(), reverse=True)[:most]
    return [LargeBuffer(size, n, module, shape) for (size, module, shape), n in ordered]


def _run(program: Program, computation: Computation) -> Iterator[Computation]:
    """Yield the computations whose values have memory of their own: loops, not fusions."""
    yield computation
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "conditional", "call"):
            roles = ("body", "branch_computations", "true_computation", "false_computation")
            roles += ("to_apply",) if instruction.opcode == "call" else ()
            for called in program.called_by(instruction, *roles):
                yield from _run(program, called)


def _arrays(shape: Shape) -> Iterator[Shape]:
    if shape.dtype != "tuple":
        yield shape
    for element in shape.elements:
        yield from _arrays(element)


def _describe(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
