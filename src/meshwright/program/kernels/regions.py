"""Regions: equations of a program that one kernel evaluates together, and how they are reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.program.blocks.block_lists import cut_segments
from meshwright.program.evaluate.dependencies import (
    dependent_variables,
    needed_equations,
    variables,
)
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Value,
    Var,
    equation_module,
)
from meshwright.program.jaxpr.names import common_module


@dataclass(frozen=True)
class Substitution:
    """A part of a program that a kernel evaluates, or could evaluate.

    Attributes:
        kind: what it computes: ``recurrence``, ``attention``, ``loss``, ``norm`` or ``activation``.
        module: where.
        kernel: what evaluates it; empty if it is evaluated as written.
        detail: what is special about it, such as ``causal``.
        reason: why it is evaluated as written; empty if a kernel evaluates it.
    """

    kind: str
    module: str
    kernel: str = ""
    detail: str = ""
    reason: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        detail = f" ({self.detail})" if self.detail else ""
        what = self.kernel or f"as written, because {self.reason}"
        return f"{self.kind}{detail}{where}: {what}"


def describe(substitutions: Sequence[Substitution]) -> list[str]:
    """Return a line for each kind; those that differ only in their block share one."""
    kinds: dict[Substitution, list[Substitution]] = {}
    for one in substitutions:
        parts = ["*" if part.isdecimal() else part for part in one.module.split(".")]
        kinds.setdefault(replace(one, module=".".join(parts)), []).append(one)
    return [
        f"{kind} × {len(each)}" if len(each) > 1 else str(each[0]) for kind, each in kinds.items()
    ]


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
        module: the innermost module they belong to.
        eqns: the equations that are not evaluated as written, in program order.
        inputs: the variables they read from outside that the kernel reads too.
        outputs: the variables that are read outside, or returned.
        place: where they are evaluated.
        kernel: evaluates them.
        detail: what is special about this one, such as ``causal``.
    """

    module: str
    eqns: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    place: EvaluationPoint
    kernel: Kernel
    detail: str = ""


@dataclass(frozen=True)
class EvaluationPoint:
    """Where in a program a region is evaluated.

    Attributes:
        eqn: the equation at whose place it is evaluated.
        ahead: later equations that make its inputs, which are evaluated before.
    """

    eqn: Equation
    ahead: tuple[Equation, ...] = ()


class Graph:
    """Which equations of a program make and read each variable.

    Attributes:
        jaxpr: the program.
        maker: by variable, the number of the equation that makes it.
        readers: by variable, the numbers of the equations that read it, dead ones left out.
        dead: the variables that nothing depends on.
        segments: by equation number, the block it belongs to, or the part between two blocks.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.maker, self.dead = jaxpr, dict[Var, int](), set[Var]()
        self.readers, self.segments = defaultdict[Var, list[int]](list), list[int]()
        effects = [v for eqn in self.jaxpr.eqns if eqn.effects for v in (*eqn.outvars, *eqn.invars)]
        live = needed_equations(self.jaxpr.eqns, [*self.jaxpr.outvars, *effects])
        made = {v for eqn in live for v in eqn.outvars}
        for number, eqn in enumerate(self.jaxpr.eqns):
            self.maker.update(dict.fromkeys(eqn.outvars, number))
            if not eqn.effects and not made.intersection(eqn.outvars):
                self.dead.update(eqn.outvars)
                continue
            for atom in variables(eqn.invars):
                self.readers[atom].append(number)
        for number, segment in enumerate(cut_segments(self.jaxpr)):
            self.segments += [number] * len(segment.eqns)
        self._returned = set(variables(self.jaxpr.outvars))

    @property
    def live(self) -> list[Equation]:
        """The equations that something depends on."""
        return [e for e in self.jaxpr.eqns if e.effects or not self.dead.issuperset(e.outvars)]

    def made_by(self, atom: Atom, *names: str) -> Equation | None:
        """Return the equation that makes an atom, if it has one of these names (any by default)."""
        if isinstance(atom, Literal) or atom not in self.maker:
            return None
        eqn = self.jaxpr.eqns[self.maker[atom]]
        return eqn if not names or eqn.primitive.name in names else None

    def before(self, atom: Atom, *names: str) -> Atom:
        """Return what an atom is computed from by equations of these names alone."""
        while (eqn := self.made_by(atom, *names)) is not None:
            atom = eqn.invars[0]
        return atom

    def read_by(self, variable: Var) -> list[Equation]:
        """Return the equations that read a variable."""
        return [self.jaxpr.eqns[number] for number in self.readers.get(variable, ())]

    def downstream(self, variable: Var, follows: Callable[[Equation], bool]) -> Iterator[Equation]:
        """Yield the equations that read a variable, or a function of it.

        Args:
            variable: the variable.
            follows: whether the results of an equation count as functions of it.
        """
        pending, seen = [variable], {variable}
        while pending:
            for eqn in self.read_by(pending.pop()):
                yield eqn
                results = [v for v in eqn.outvars if v not in seen and follows(eqn)]
                pending += results
                seen.update(results)

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

    def region(
        self,
        eqns: tuple[Equation, ...],
        inputs: tuple[Var, ...],
        outputs: tuple[Var, ...],
        kernel: Kernel,
        detail: str = "",
    ) -> Region:
        """Return the region of equations that a kernel evaluates where `place` says."""
        place = self.place(eqns, inputs, outputs)
        return Region(module_name(eqns), eqns, inputs, outputs, place, kernel, detail)

    def place(
        self, eqns: Sequence[Equation], inputs: Sequence[Var], outputs: Sequence[Var]
    ) -> EvaluationPoint:
        """Return where equations can be evaluated together: before anything reads a result.

        Raises:
            NotReplaced: if they cannot.
        """
        numbers = {self.number(eqn) for eqn in eqns}
        if len({self.segments[n] for n in numbers}) > 1:
            raise NotReplaced("its equations belong to several blocks")
        made = [v for eqn in eqns for v in eqn.outvars]
        readers = {v: [n for n in self.readers.get(v, ()) if n not in numbers] for v in made}
        for variable in set(made) - set(outputs):
            if readers[variable] or self.is_returned(variable):
                outside = [self.jaxpr.eqns[n].primitive.name for n in readers[variable]]
                raise NotReplaced(f"a value inside is read by {[*outside, 'the caller'][0]} too")
        first_read = min((n for v in outputs for n in readers[v]), default=len(self.jaxpr.eqns))
        before = [n for n in numbers if n < first_read]
        place = max(before) if before else -1
        late = [v for v in inputs if self.maker.get(v, -1) > place]
        ahead = needed_equations(self.jaxpr.eqns[place + 1 :], late)
        if place < 0 or dependent_variables(ahead, made) & {v for e in ahead for v in e.outvars}:
            raise NotReplaced("what it reads depends on its own results")
        return EvaluationPoint(self.jaxpr.eqns[place], tuple(ahead))


def module_name(eqns: Sequence[Equation]) -> str:
    """Return the innermost module that all equations are in."""
    return common_module(map(equation_module, eqns))
