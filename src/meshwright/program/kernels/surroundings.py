"""The variables of a program and of the programs around it, and which of them are constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from meshwright.program.dims import ProgramDims
from meshwright.program.evaluate.dependencies import needed_equations
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
)
from meshwright.program.jaxpr.walks import called_programs
from meshwright.program.kernels.regions import NotReplaced


class Scope:
    """The variables of a program, and of the programs around it that it reads values of.

    Args:
        program: the call of the program.
        consts: the constants of the outermost program, by variable.
        outer: the scope of the equation that calls it.
        arguments: by input of the program, the atom of the outer scope that it always is.
    """

    def __init__(
        self,
        program: ProgramDims,
        consts: Mapping[Var, Any],
        outer: Scope | None = None,
        arguments: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.program, self.consts, self.outer = program, consts, outer
        self.arguments = arguments or {}
        self._maker = {v: eqn for eqn in program.jaxpr.eqns for v in eqn.outvars}
        self._constants: dict[Var, ClosedJaxpr | None] = {}

    def origin(self, atom: Atom) -> tuple[Scope, Atom]:
        """Return where an atom comes from: a scope, and its atom there."""
        if not isinstance(atom, Literal) and self.outer is not None and atom in self.arguments:
            return self.outer.origin(self.arguments[atom])
        return self, atom

    def maker(self, atom: Atom) -> Equation | None:
        """Return the equation that makes an atom of this scope."""
        return None if isinstance(atom, Literal) else self._maker.get(atom)

    def constant(self, atom: Atom) -> ClosedJaxpr | None:
        """Return a program without inputs that computes an atom; None if it depends on inputs."""
        if isinstance(atom, Literal):
            return None
        if atom not in self._constants:
            self._constants[atom] = self._make_constant(atom)
        return self._constants[atom]

    def _make_constant(self, variable: Var) -> ClosedJaxpr | None:
        program = _Program()
        try:
            program.add(self, variable)
        except NotReplaced:
            return None
        return program.close(variable)


class _Program:
    """Collects the equations that a value is computed with, across scopes."""

    def __init__(self) -> None:
        self.eqns: list[Equation] = []
        self.consts: dict[Var, Any] = {}
        self._done: set[Var] = set()

    def add(self, scope: Scope, atom: Atom) -> None:
        eqns = needed_equations(scope.program.jaxpr.eqns, [atom])
        made = {v for eqn in eqns for v in eqn.outvars}
        read: list[Atom] = [a for eqn in eqns for a in eqn.invars]
        for variable in [*read, atom]:
            if isinstance(variable, Literal) or variable in made or variable in self._done:
                continue
            self._done.add(variable)
            if variable in scope.consts:
                self.consts[variable] = scope.consts[variable]
                continue
            outer, source = scope.origin(variable)
            if outer is scope or isinstance(source, Literal):
                raise NotReplaced("it depends on data")
            outer_program = outer.constant(source)
            if outer_program is None:
                raise NotReplaced("it depends on data")
            self.consts[variable] = outer_program
        self.eqns += eqns

    def close(self, atom: Var) -> ClosedJaxpr:
        def run() -> Any:
            values = {
                v: Evaluator().run(c, [])[0] if isinstance(c, ClosedJaxpr) else c
                for v, c in self.consts.items()
            }
            Evaluator().extend(values, self.eqns)
            return values[atom]

        return jax.make_jaxpr(run)()


def scopes(program: ProgramDims, consts: Mapping[Var, Any]) -> list[Scope]:
    """Return the scope of a program and of every program called from it."""
    found: list[Scope] = []

    def visit(scope: Scope) -> None:
        found.append(scope)
        for number, inner in scope.program.calls.items():
            eqn = scope.program.jaxpr.eqns[number]
            if eqn.primitive.name.startswith("custom_"):
                # Its derivative is the model's own.
                continue
            for called in inner:
                visit(Scope(called, scope.consts, scope, _arguments(eqn, called.jaxpr)))

    visit(Scope(program, consts))
    return found


def _arguments(eqn: Equation, jaxpr: Jaxpr) -> dict[Var, Atom]:
    if eqn.primitive.name != "scan" and eqn.primitive.name not in CALLS | REMATS:
        return {}
    (_, arguments), *_ = called_programs(eqn)
    return dict(zip(jaxpr.invars, arguments, strict=False))
