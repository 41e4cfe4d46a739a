"""The variables of a program and of the programs around it, and which of them are constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import needed_equations, variables_read
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
)
from meshwright.program.jaxpr.walks import called_programs
from meshwright.program.kernels.regions import Graph

REPEATS = ("broadcast_in_dim", "reshape", "convert_element_type")
"""Operations after which a number per row, or a single one, is still the same number."""


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
        self.graph = Graph(program.jaxpr)
        self._constants: dict[Var, ClosedJaxpr | None] = {}

    def origin(self, atom: Atom) -> tuple[Scope, Atom]:
        """Return where an atom comes from: a scope, and its atom there."""
        if not isinstance(atom, Literal) and self.outer is not None and atom in self.arguments:
            return self.outer.origin(self.arguments[atom])
        return self, atom

    def constant(self, atom: Atom) -> ClosedJaxpr | None:
        """Return a program without inputs that computes an atom; None if it depends on inputs."""
        if isinstance(atom, Literal):
            return None
        if atom not in self._constants:
            self._constants[atom] = self._make_constant(atom)
        return self._constants[atom]

    def number(self, atom: Atom) -> float | None:
        """Return the value of a constant scalar, which may be repeated."""
        scope, atom = self.origin(self.graph.before(atom, *REPEATS))
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        program = scope.constant(atom) if aval_of(atom).shape == () else None
        if program is None:
            return None
        with jax.enable_x64(True):
            return float(wide_evaluator().run(program, [])[0])

    def _make_constant(self, variable: Var) -> ClosedJaxpr | None:
        eqns = needed_equations(self.program.jaxpr.eqns, [variable])
        made = {v for eqn in eqns for v in eqn.outvars}
        read = [*variables_read(eqns), variable]
        known: dict[Var, Any] = {}
        for outside in (v for v in read if v not in made):
            scope, source = self.origin(outside)
            if outside in self.consts:
                known[outside] = self.consts[outside]
            elif scope is not self and (program := scope.constant(source)) is not None:
                known[outside] = program
            else:
                return None

        def run() -> Any:
            values = {
                v: Evaluator().run(c, [])[0] if isinstance(c, ClosedJaxpr) else c
                for v, c in known.items()
            }
            Evaluator().extend(values, eqns)
            return values[variable]

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
