"""Dependencies in a program: what some values are computed from, and what depends on them."""

from collections.abc import Collection, Iterable, Sequence

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from meshwright.program.evaluate.evaluator import Evaluator, Rule
from meshwright.program.jaxpr.equations import (
    WITHOUT_RESULT,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    structs_of,
)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among atoms, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def variables_read(eqns: Iterable[Equation]) -> list[Var]:
    """Return the variables that equations read, each once, in order."""
    return variables(atom for eqn in eqns for atom in eqn.invars)


def needed_equations(
    eqns: Sequence[Equation], wanted: Iterable[Atom], given: Collection[Var] = ()
) -> list[Equation]:
    """Return the equations, in order, that compute values from those that are given."""
    known = set(given)
    needed_variables = set(variables(wanted)) - known
    needed: list[Equation] = []
    for eqn in reversed(eqns):
        if not needed_variables.isdisjoint(eqn.outvars):
            needed.append(eqn)
            needed_variables.update(set(variables(eqn.invars)) - known)
    return needed[::-1]


def inputs_of(eqns: Sequence[Equation], wanted: Iterable[Atom] = ()) -> set[Var]:
    """Return the variables from outside that equations read, or that are wanted themselves."""
    computed = {variable for eqn in eqns for variable in eqn.outvars}
    return (set(variables_read(eqns)) | set(variables(wanted))) - computed


def dependent_variables(eqns: Sequence[Equation], sources: Collection[Var]) -> set[Var]:
    """Return the variables whose values depend on the sources, and the sources themselves."""
    dependent = set(sources)
    for eqn in eqns:
        if not dependent.isdisjoint(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent


def select_outputs(closed: ClosedJaxpr, outputs: Sequence[int]) -> tuple[ClosedJaxpr, list[int]]:
    """Return a program with only these outputs, and the numbers of the inputs it reads.

    Everything that is computed for other outputs is removed, inside of loops too.
    """
    if closed.jaxpr.effects:
        # Debug prints and checks would keep their operands alive.
        closed = inlined(closed, [lambda e, _: [] if e.primitive.name in WITHOUT_RESULT else None])
    wanted = [number in set(outputs) for number in range(len(closed.jaxpr.outvars))]
    # Constants are made inputs first, so that unused ones are removed like unused inputs.
    jaxpr = closed.jaxpr.replace(
        constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
    )
    smaller, used = dce_jaxpr(jaxpr, wanted)
    consts = [c for c, is_used in zip(closed.consts, used, strict=False) if is_used]
    count = len(consts)
    program = smaller.replace(constvars=smaller.invars[:count], invars=smaller.invars[count:])
    used_inputs = used[len(closed.consts) :]
    return ClosedJaxpr(program, consts), [n for n, is_used in enumerate(used_inputs) if is_used]


def inlined(closed: ClosedJaxpr, rules: Sequence[Rule] = ()) -> ClosedJaxpr:
    """Return a program with calls inlined, evaluated by these rules."""
    inputs = structs_of(closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: Evaluator(rules).run(closed, args))(*inputs)
