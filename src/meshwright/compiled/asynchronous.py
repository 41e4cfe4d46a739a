"""Which collectives of a scheduled program run while the device computes products."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compiled.collectives import Collective, collectives_of, is_collective
from meshwright.compiled.hlo import CALL_ROLES, Computation, Instruction, Program, parse_hlo
from meshwright.program.jaxpr.names import module_of

_PRODUCTS = ("dot", "convolution", "ragged-dot")
# Matrix products, convolutions and attention; cuDNN's norm is none of these.
_PRODUCT_CALL = re.compile(r'"__(cublas|cudnn)\$(?!norm)')
_START = "-start"
_MERGED = re.compile("[:;]")


@dataclass(frozen=True)
class Scheduled:
    """A collective of a scheduled program.

    It is overlapped if a product is computed between its start and its end; None if its end was not
    found. Its modules are several where the compiler has merged them.
    """

    collective: Collective
    overlapped: bool | None
    modules: tuple[str, ...]


def is_scheduled(text: str) -> bool:
    """Whether the instructions of a program are written in the order in which they start."""
    return "is_scheduled=true" in text.partition("\n")[0]


def scheduled_collectives(text: str, mesh_axes: Mapping[str, int]) -> list[Scheduled]:
    """List the collectives of a scheduled program, and whether products run at the same time."""
    program = parse_hlo(text)
    overlaps = _Schedule(program).overlaps()
    # The op names of what each collective sends, by the name of its instruction.
    producers = {
        instruction.name: [computation.by_name[o].op_name for o in instruction.operands]
        for computation in program.computations.values()
        for instruction in computation.instructions
        if is_collective(instruction)
    }
    return [
        Scheduled(c, overlaps[c.name], _modules(c.op_name) or _modules(*producers[c.name]))
        for c in collectives_of(program, mesh_axes)
    ]


def _modules(*op_names: str) -> tuple[str, ...]:
    """Return the innermost modules of op names, of which each may be several that were merged."""
    parts = [part for op_name in op_names for part in _MERGED.split(op_name)]
    return tuple(dict.fromkeys(filter(None, map(module_of, parts))))


@dataclass(frozen=True)
class _Schedule:
    """Follows collectives from their start to their end, through the state of loops too."""

    program: Program
    with_products: dict[str, bool] = field(default_factory=dict[str, bool])

    def overlaps(self) -> dict[str, bool | None]:
        """Return whether products run during each collective, by the name of its instruction."""
        found: dict[str, bool | None] = {}
        inside: dict[str, bool | None] = {}
        for computation in self.program.computations.values():
            for instruction in computation.instructions:
                if is_collective(instruction):
                    found[instruction.name] = self._overlaps(computation, instruction)
                elif instruction.opcode.endswith(_START):
                    during = self._overlaps(computation, instruction)
                    inside |= dict.fromkeys(self._collectives_in(instruction), during)
                elif instruction.opcode == "fusion":
                    # What runs at the same time is up to the code generated for the fusion.
                    inside |= dict.fromkeys(self._collectives_in(instruction), None)
        return found | inside

    def _overlaps(self, computation: Computation, start: Instruction) -> bool | None:
        is_sync = '"is_sync":true' in start.attributes.get("backend_config", "")
        if is_sync or not start.opcode.endswith(_START):
            return False
        first = computation.position[start.name] + 1
        return self._until_done(computation, start.name, first, frozenset())

    def _until_done(
        self, computation: Computation, value: str, begin: int, seen: frozenset[tuple[str, str]]
    ) -> bool | None:
        """Whether products are computed from ``begin`` until the end of what was started.

        ``value`` is what the start returned, or the element of a loop's state that holds it; those
        ``seen`` were followed already, by computation.
        """
        key = (computation.name, value)
        for user in computation.users[value] if key not in seen else ():
            if user.opcode.endswith("-done"):
                return self._product_in(computation, begin, computation.position[user.name])
            during = None
            if user.opcode.endswith("-update"):
                during = self._until_done(computation, user.name, begin, seen | {key})
            elif user.opcode == "tuple":
                index = user.operands.index(value)
                during = self._in_state(computation, user, index, begin, seen | {key})
            if during is not None:
                return during
        return None

    def _in_state(
        self,
        computation: Computation,
        state: Instruction,
        index: int,
        begin: int,
        seen: frozenset[tuple[str, str]],
    ) -> bool | None:
        """Whether products are computed until the end of what a loop's state has at ``index``."""
        if state.is_root and (called := self._loops.get(computation.name)):
            # The next iteration ends it, or what comes after the loop.
            caller, loop = called
            before = self._product_in(computation, begin, len(computation.instructions))
            ends = [(computation, computation.parameters[0], 0)]
            ends.append((caller, loop, caller.position[loop.name] + 1))
        else:
            loops = [user for user in computation.users[state.name] if user.opcode == "while"]
            if not loops:
                return None
            before = self._product_in(computation, begin, computation.position[loops[0].name])
            (body,) = self.program.called_by(loops[0], "body")
            ends = [(body, body.parameters[0], 0)]
        for inner, source, first in ends:
            for element in inner.users[source.name]:
                if element.attributes.get("index") != str(index):
                    continue
                during = self._until_done(inner, element.name, first, seen)
                if during is not None:
                    return before or during
        return None

    @cached_property
    def _loops(self) -> dict[str, tuple[Computation, Instruction]]:
        """For each body of a loop, the loop and the computation it is in."""
        return {
            body.name: (computation, instruction)
            for computation in self.program.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "while"
            for body in self.program.called_by(instruction, "body")
        }

    def _product_in(self, computation: Computation, begin: int, end: int) -> bool:
        return any(self._computes(i) for i in computation.instructions[begin:end])

    def _computes(self, instruction: Instruction) -> bool:
        """Whether an instruction is a product, or calls a computation that has one."""
        if instruction.opcode in _PRODUCTS:
            return True
        if _PRODUCT_CALL.match(instruction.attributes.get("custom_call_target", "")):
            return True
        return any(map(self._has_product, self.program.called_by(instruction, *CALL_ROLES)))

    def _has_product(self, computation: Computation) -> bool:
        known = self.with_products.get(computation.name)
        if known is None:
            known = any(map(self._computes, computation.instructions))
            self.with_products[computation.name] = known
        return known

    def _collectives_in(self, instruction: Instruction) -> Iterator[str]:
        """Return the names of the collectives that an instruction calls."""
        for called in self.program.called_by(instruction, *CALL_ROLES):
            for inner in called.instructions:
                if is_collective(inner):
                    yield inner.name
                yield from self._collectives_in(inner)
