"""Values that a program passes on as they are, through calls and loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    scan_counts,
)


def origin(jaxpr: Jaxpr, atom: Atom, casts_to: Collection[Any] = ()) -> Atom:
    """Return the first atom of a program with the same value as this one.

    Transforms of Flax (`nnx.scan`, `nnx.remat`) return every variable of a model, also those that
    have not changed. ``casts_to`` are formats whose casts count as the same value.
    """
    made = {v: (eqn, n) for eqn in jaxpr.eqns for n, v in enumerate(eqn.outvars)}
    while isinstance(atom, Var) and atom in made:
        operand = _operand(*made[atom], casts_to)
        if operand is None:
            break
        atom = operand
    return atom


def _operand(eqn: Equation, number: int, casts_to: Collection[Any]) -> Atom | None:
    """Return the operand that a result of an equation is; None if it is computed."""
    name = eqn.primitive.name
    if name == "convert_element_type" and eqn.params["new_dtype"] in casts_to:
        return eqn.invars[0]
    if name in CALLS or name in REMATS:
        return _at(eqn.invars, _input(called_jaxpr(eqn).jaxpr, number))
    if name == "scan":
        consts, carries = scan_counts(eqn)
        position = _input(eqn.params["jaxpr"].jaxpr, number)
        same_carry = position == consts + number
        same_rows = number >= carries and (position or 0) >= consts + carries
        return _at(eqn.invars, position if same_carry or same_rows else None)
    if name == "cond":
        positions = {_input(branch.jaxpr, number) for branch in eqn.params["branches"]}
        return _at(eqn.invars[1:], positions.pop() if len(positions) == 1 else None)
    return None


def _input(jaxpr: Jaxpr, number: int) -> int | None:
    """Return the position of the input that a result of a program is; None if it is none."""
    source = origin(jaxpr, jaxpr.outvars[number])
    if isinstance(source, Literal) or source not in jaxpr.invars:
        return None
    return jaxpr.invars.index(source)


def _at(atoms: Sequence[Atom], position: int | None) -> Atom | None:
    return None if position is None else atoms[position]
