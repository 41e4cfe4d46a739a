"""Following values through a program, and into the programs that its equations call."""

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    equation_module,
    scan_counts,
)

Fact = TypeVar("Fact")
"""What is known about a value."""


def propagate(
    jaxpr: Jaxpr,
    inputs: Sequence[Fact],
    of_constants: Fact,
    rule: Callable[[Equation, list[Fact]], Sequence[Fact]],
) -> list[Fact]:
    """Return what is known about a program's results, given its inputs and constants.

    The rule goes from an equation and what is known about its operands to the same for its results.
    """
    known: dict[Var, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Atom]) -> list[Fact]:
        return [
            of_constants if isinstance(a, Literal) else known.get(a, of_constants) for a in atoms
        ]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, rule(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def called_programs(eqn: Equation) -> list[tuple[ClosedJaxpr, Sequence[Atom]]]:
    """Return the programs that an equation runs, each with the operands it gets in every run.

    These are its first inputs: all of them for a call or a branch, the constants for a loop.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        return [(params["jaxpr"], eqn.invars[: scan_counts(eqn)[0]])]
    if name == "while":
        start, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        condition = params["cond_jaxpr"], eqn.invars[:start]
        return [condition, (params["body_jaxpr"], eqn.invars[start:stop])]
    if name == "cond":
        return [(branch, eqn.invars[1:]) for branch in params["branches"]]
    if {"jaxpr", "call_jaxpr", "fun_jaxpr"}.isdisjoint(params):
        return []
    return [(called_jaxpr(eqn), eqn.invars)]


def all_equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Equation, int]]:
    """Yield every equation of a program and of those it calls, and how often each is evaluated."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for program, _ in called_programs(eqn):
            yield from all_equations(program.jaxpr, inside)


def where(eqn: Equation) -> str:
    """Return an operation and its module."""
    module = equation_module(eqn)
    return f"{eqn.primitive.name} {f'in {module}' if module else 'outside all modules'}"


def quoted(eqn: Equation) -> str:
    """Return an operation, and its module if it is in one, as a message quotes them."""
    module = equation_module(eqn)
    return f"`{eqn.primitive.name}`{f' in `{module}`' if module else ''}"


def origin(jaxpr: Jaxpr, atom: Atom, casts_to: Collection[Any] = ()) -> Atom:
    """Return the first atom of a program with the same value as this one.

    Transforms of Flax (`nnx.scan`, `nnx.remat`) return every variable of a model, also those that
    have not changed. ``casts_to`` are formats whose casts count as the same value.
    """
    made = {v: (eqn, n) for eqn in jaxpr.eqns for n, v in enumerate(eqn.outvars)}
    while isinstance(atom, Var) and atom in made:
        operand = operand_of(*made[atom], casts_to)
        if operand is None:
            break
        atom = operand
    return atom


def operand_of(eqn: Equation, number: int, casts_to: Collection[Any]) -> Atom | None:
    """Return the operand that a result of an equation is; None if it is computed."""
    name = eqn.primitive.name
    if name == "convert_element_type" and eqn.params["new_dtype"] in casts_to:
        return eqn.invars[0]
    if name == "scan":
        consts, carries = scan_counts(eqn)
        position = _input(eqn.params["jaxpr"].jaxpr, number)
        same_carry = position == consts + number
        same_rows = number >= carries and (position or 0) >= consts + carries
        return eqn.invars[position] if position is not None and (same_carry or same_rows) else None
    if name == "cond" or name in CALLS or name in REMATS:
        programs = called_programs(eqn)
        positions = {_input(closed.jaxpr, number) for closed, _ in programs}
        position = positions.pop() if len(positions) == 1 else None
        return None if position is None else programs[0][1][position]
    return None


def _input(jaxpr: Jaxpr, number: int) -> int | None:
    """Return the position of the input that a result of a program is; None if it is none."""
    source = origin(jaxpr, jaxpr.outvars[number])
    if isinstance(source, Literal) or source not in jaxpr.invars:
        return None
    return jaxpr.invars.index(source)


def program_key(program: ClosedJaxpr) -> Hashable:
    """Return what programs that compute the same have in common, with their constants."""
    consts = [np.asarray(const) for const in program.consts]
    values = ((c.shape, str(c.dtype), hashlib.sha256(c.tobytes()).digest()) for c in consts)
    return str(program), tuple(values)
