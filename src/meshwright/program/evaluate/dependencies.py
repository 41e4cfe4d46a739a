"""Parts of a program: the equations some values need, and the values some inputs reach."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.jaxpr.equations import (
    WITHOUT_RESULT,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    structs_of,
)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among atoms, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def needed(eqns: Sequence[Equation], wanted: Iterable[Atom]) -> list[Equation]:
    """Return the equations that some variables need, in order."""
    open_ends = set(variables(wanted))
    kept: list[Equation] = []
    for eqn in reversed(eqns):
        if not open_ends.isdisjoint(eqn.outvars):
            kept.append(eqn)
            open_ends.update(variables(eqn.invars))
    return kept[::-1]


def inputs_of(eqns: Sequence[Equation], wanted: Iterable[Atom] = ()) -> set[Var]:
    """Return the variables that equations, or readers of their results, take from outside."""
    own = {variable for eqn in eqns for variable in eqn.outvars}
    read = set(variables(atom for eqn in eqns for atom in eqn.invars)) | set(variables(wanted))
    return read - own


def reached(eqns: Sequence[Equation], sources: Collection[Var]) -> set[Var]:
    """Return the variables whose values depend on the sources, these included."""
    dependent = set(sources)
    for eqn in eqns:
        if not dependent.isdisjoint(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent


def only_for(closed: ClosedJaxpr, outputs: Sequence[int]) -> tuple[ClosedJaxpr, list[int]]:
    """Return a program with these of its outputs alone, and the numbers of the inputs it reads.

    Loops are entered: what a loop computes for other outputs is left out.
    """
    closed = _silent(closed) if closed.jaxpr.effects else closed
    wanted = [number in set(outputs) for number in range(len(closed.jaxpr.outvars))]
    # The constants are made inputs first, so that unused ones are left out with the rest.
    jaxpr = closed.jaxpr.replace(
        constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
    )
    smaller, used = dce_jaxpr(jaxpr, wanted)
    count = len(closed.consts)
    consts = [c for c, is_used in zip(closed.consts, used, strict=False) if is_used]
    split = len(consts)
    program = smaller.replace(constvars=smaller.invars[:split], invars=smaller.invars[split:])
    return ClosedJaxpr(program, consts), [n for n, u in enumerate(used[count:]) if u]


def _silent(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program without debug prints and checks, which would keep their operands alive."""
    inputs = structs_of(closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: Evaluator([_leave_out]).run(closed, args))(*inputs)


def _leave_out(eqn: Equation, env: Environment) -> list[Value] | None:
    return [] if eqn.primitive.name in WITHOUT_RESULT else None
