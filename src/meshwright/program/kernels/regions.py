"""Regions: equations of a program that one kernel evaluates together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.program.blocks.segments import cut_segments
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Value,
    Var,
    name_stack,
)
from meshwright.program.jaxpr.names import module_of


class NotReplaced(Exception):
    """Why a region that looks like a known one is evaluated as written."""


class Kernel(Protocol):
    """What evaluates a region."""

    @property
    def name(self) -> str:
        """What runs, such as ``cudnn``."""
        ...

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the region's outputs; its inputs are read from the environment."""
        ...


@dataclass(frozen=True)
class Region:
    """Equations that one kernel evaluates together.

    Attributes:
        kind: what they compute, such as ``attention``.
        module: the innermost module they belong to.
        eqns: the equations that are not evaluated as written, in program order.
        inputs: the variables they read from outside that the kernel reads too.
        outputs: the variables that are read outside, or returned.
        kernel: evaluates them.
        detail: what is special about this one, such as ``causal``.
    """

    kind: str
    module: str
    eqns: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    kernel: Kernel
    detail: str = ""

    @property
    def last(self) -> Var:
        """The first result of the last equation, where the region is evaluated."""
        return self.eqns[-1].outvars[0]

    @property
    def interior(self) -> set[Var]:
        """The variables that are not computed any more."""
        return {v for eqn in self.eqns for v in eqn.outvars} - set(self.outputs)


@dataclass
class Graph:
    """Which equations of a program make and read each variable.

    Attributes:
        jaxpr: the program.
        maker: by variable, the number of the equation that makes it.
        readers: by variable, the numbers of the equations that read it.
        segments: by equation number, the block it belongs to, or the part between two blocks.
    """

    jaxpr: Jaxpr
    maker: dict[Var, int] = field(default_factory=dict[Var, int])
    readers: dict[Var, list[int]] = field(default_factory=lambda: defaultdict(list))
    segments: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        for number, eqn in enumerate(self.jaxpr.eqns):
            self.maker.update(dict.fromkeys(eqn.outvars, number))
            for atom in dict.fromkeys(a for a in eqn.invars if not isinstance(a, Literal)):
                self.readers[atom].append(number)
        for number, segment in enumerate(cut_segments(self.jaxpr)):
            self.segments += [number] * len(segment.eqns)
        self._returned = {a for a in self.jaxpr.outvars if not isinstance(a, Literal)}

    def made_by(self, atom: Atom, *names: str) -> Equation | None:
        """Return the equation that makes an atom, if it has one of these names (any by default)."""
        if isinstance(atom, Literal) or atom not in self.maker:
            return None
        eqn = self.jaxpr.eqns[self.maker[atom]]
        return eqn if not names or eqn.primitive.name in names else None

    def read_by(self, variable: Var) -> list[Equation]:
        """Return the equations that read a variable."""
        return [self.jaxpr.eqns[number] for number in self.readers.get(variable, ())]

    def is_returned(self, variable: Var) -> bool:
        """Whether the program returns a variable."""
        return variable in self._returned

    def only_reader(self, variable: Var) -> Equation:
        """Return the one equation that reads a variable."""
        readers = self.read_by(variable)
        if len(readers) != 1 or self.is_returned(variable):
            raise NotReplaced("a value inside is read elsewhere too")
        return readers[0]

    def number(self, eqn: Equation) -> int:
        """Return the position of an equation."""
        return self.maker[eqn.outvars[0]]

    def in_order(self, eqns: Iterable[Equation]) -> tuple[Equation, ...]:
        """Return equations in program order, each once."""
        return tuple(self.jaxpr.eqns[n] for n in sorted({self.number(eqn) for eqn in eqns}))

    def check(self, eqns: Sequence[Equation], outputs: Sequence[Var]) -> None:
        """Raise unless equations can be evaluated together, at the place of the last one."""
        numbers = {self.number(eqn) for eqn in eqns}
        if len({self.segments[n] for n in numbers}) > 1:
            raise NotReplaced("its equations belong to several blocks")
        last = max(numbers)
        for eqn in eqns:
            for variable in eqn.outvars:
                outside = [n for n in self.readers.get(variable, ()) if n not in numbers]
                if variable not in outputs and (outside or self.is_returned(variable)):
                    reader = self.jaxpr.eqns[outside[0]].primitive.name if outside else "the caller"
                    raise NotReplaced(f"a value inside is read elsewhere, by {reader}")
                if any(n < last for n in outside):
                    raise NotReplaced("a result is read before the last one is computed")


def module_name(eqns: Sequence[Equation]) -> str:
    """Return the innermost module that all equations are in."""
    modules = [module_of(name_stack(eqn)).split(".") for eqn in eqns]
    common = modules[0]
    for path in modules[1:]:
        same = [a for a, b in zip(common, path, strict=False) if a == b]
        common = common[: len(same)] if common[: len(same)] == same else []
    return ".".join(common)
