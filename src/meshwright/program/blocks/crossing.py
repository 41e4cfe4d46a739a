"""Values that cross from one part of a program to another, described for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.program.jaxpr.equations import (
    REARRANGES,
    Atom,
    Equation,
    Literal,
    Var,
    aval_of,
    name_stack,
)
from meshwright.program.jaxpr.names import module_of


def describe_operation(eqn: Equation) -> str:
    """Return the operation and the module it belongs to."""
    module = module_of(name_stack(eqn))
    return f"{eqn.primitive.name} in `{module}`" if module else eqn.primitive.name


def describe_value(eqns: Iterable[Equation], atom: Atom) -> str:
    """Return the shape of a value, and where it is computed if one of the equations does."""
    maker = next((eqn for eqn in eqns if atom in eqn.outvars), None)
    text = f"a value of shape {list(aval_of(atom).shape)}"
    return f"{text}, made by {describe_operation(maker)}" if maker else text


def first_reader(eqns: Iterable[Equation], variable: Var) -> Equation | None:
    """Return the first equation that reads a variable."""
    return next((eqn for eqn in eqns if any(atom is variable for atom in eqn.invars)), None)


def user_of(eqns: Sequence[Equation], variable: Var) -> Equation | None:
    """Return the first equation that computes with a variable, or with a part of it."""
    reader = first_reader(eqns, variable)
    while reader and reader.primitive.name in REARRANGES:
        further = first_reader(eqns, reader.outvars[0])
        if further is None:
            break
        reader = further
    return reader


def describe_jump(
    paths: Sequence[str], bodies: Sequence[Sequence[Equation]], column: Sequence[Atom]
) -> str:
    """Say which block reads which value of another block than the one before it.

    Args:
        paths: the paths of the blocks.
        bodies: their equations.
        column: by block, the operand that it reads at one place.
    """
    owners = [_owner(bodies, atom) for atom in column]
    usual = owners[1] is not None and 1 - owners[1]
    reader = next(
        (n for n, owner in enumerate(owners) if n and (owner is None or n - owner != usual)),
        len(owners) - 1,
    )
    atom, owner = column[reader], owners[reader]
    made = [eqn for body in bodies for eqn in body]
    where = first_reader(bodies[reader], atom) if isinstance(atom, Var) else None
    reads = f"`{paths[reader]}`" + (f" ({describe_operation(where)})" if where else "")
    source = f"of `{paths[owner]}`" if owner is not None else "from before the blocks"
    return (
        f"{reads} reads {describe_value(made, atom)}, {source}, where `{paths[1]}` reads "
        f"{describe_value(made, column[1])}"
    )


def describe_operands(eqn: Equation) -> str:
    """Return an operation with the shapes and types of what it reads."""
    reads = [f"{aval_of(atom).dtype} {list(aval_of(atom).shape)}" for atom in eqn.invars]
    return f"{describe_operation(eqn)} reads {' and '.join(reads) or 'nothing'}"


def _owner(bodies: Sequence[Sequence[Equation]], atom: Atom) -> int | None:
    """Return the number of the block that computes a value; None if none does."""
    if isinstance(atom, Literal):
        return None
    numbered = enumerate(bodies)
    return next((n for n, body in numbered if any(atom in eqn.outvars for eqn in body)), None)
