"""Evaluating a traced program equation by equation, with an ordered list of rules.

Calls, loops, branches and checkpoints are entered, so that rules see the equations inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.mesh.axes import entry_names
from meshwright.program.evaluate.weight_uses import NO_WEIGHTS, Weights
from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Numerics,
    Value,
    Var,
    aval_of,
    called_jaxpr,
    name_stack,
    scan_counts,
    scan_parts,
)

Rule = Callable[[Equation, "Environment"], "list[Value] | None"]
"""Returns the results of an equation, or None to leave it to the next rule.

A rule gets the equation and the environment, not only the values of its operands: it may read a
weight before it is rounded, or replace a call by something better than its body.
"""


class Rows(NamedTuple):
    """A copy of a value for each device, in rows, and the mesh axes that shard them."""

    value: Value
    axes: tuple[str, ...]


@dataclass(eq=False)
class Environment:
    """The values of one program's variables while it is evaluated.

    Attributes:
        evaluator: evaluates nested programs by the same rules.
        prepared: weights cast and gathered for use, by variable. Each nested program and each block
            has another environment, so that a gathered weight is freed after the block that reads
            it.
        copies: copies of values that rules made, by variable or by the value's id.
    """

    evaluator: Evaluator
    values: MutableMapping[Var, Value]
    prepared: dict[Var, Value] = field(default_factory=dict[Var, Value])
    copies: dict[Hashable, Value] = field(default_factory=dict[Hashable, Value])
    _replaced: tuple[Equation, list[Value]] | None = None

    def value(self, atom: Atom) -> Value:
        """Return the value of an atom; for a weight, as it is stored."""
        raw = atom.val if isinstance(atom, Literal) else self.values[atom]
        return self.evaluator.numerics.convert(raw)

    def read(self, atom: Atom) -> Value:
        """Return the value an equation reads; for a weight, gathered and rounded as traced."""
        if not self.is_weight(atom):
            return self.value(atom)
        return self.evaluator.weights.cast(self.in_param_dtype(atom), aval_of(atom).dtype)

    def in_param_dtype(self, atom: Atom) -> Value:
        """Return a prepared weight: rounded to the compute dtype, stored in the parameter's dtype.

        Other values are returned as `read` does.
        """
        if isinstance(atom, Literal) or not self.is_weight(atom):
            return self.value(atom)
        if atom not in self.prepared:
            use = self.evaluator.weights.uses[atom]
            self.prepared[atom] = self.evaluator.weights.prepare(self.values[use.leaf], use)
        return self.prepared[atom]

    def is_weight(self, atom: Atom) -> bool:
        """Whether an atom is a parameter, a cast of one, or a rearranged one."""
        if isinstance(atom, Literal):
            return False
        return atom in self.prepared or atom in self.evaluator.weights.uses

    def is_half_weight(self, atom: Atom) -> bool:
        """Whether an atom is a weight in half precision, prepared in the parameter's dtype."""
        if isinstance(atom, Literal) or not self.evaluator.weights.is_half(atom):
            return False
        return atom in self.prepared or self.evaluator.weights.is_cast(atom)

    def operands(self, eqn: Equation, in_param_dtype: Collection[int] = ()) -> list[Value]:
        """Return the values of an equation's operands.

        Weights at the positions ``in_param_dtype`` are not cast to the dtype of the equation.
        """
        if self._replaced is not None and self._replaced[0] is eqn:
            return list(self._replaced[1])
        return [
            self.in_param_dtype(atom) if number in in_param_dtype else self.read(atom)
            for number, atom in enumerate(eqn.invars)
        ]

    def rows(self, variable: Var) -> Rows | None:
        """Return the copies of what is larger than the weights that it is computed from."""
        return self.copies.get((Rows, variable))

    def with_operands(self, eqn: Equation, operands: Sequence[Value]) -> Environment:
        """Return the same environment with other operands for one equation."""
        return replace(self, _replaced=(eqn, list(operands)))

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluate a nested program by the same rules."""
        return self.evaluator.run(closed, args)


def constrained(variable: Var, value: Value, constraints: Mapping[Var, NamedSharding]) -> Value:
    """Return the value of a variable with its sharding constraint, if it has one."""
    return constrain(value, constraints[variable]) if variable in constraints else value


def constrain(value: Value, sharding: NamedSharding) -> Value:
    """Return a value with a sharding constraint; a dim that does not divide is padded for it.

    The compiler pads it once for all values around it, and moves nothing.
    """
    free, sizes = PartitionSpec.UNCONSTRAINED, sharding.mesh.shape
    named = [() if entry is free else entry_names(entry) for entry in sharding.spec]
    parts = [math.prod(sizes[axis] for axis in names) for names in named]
    padding = [-size % count for size, count in zip(value.shape, parts, strict=False)]
    if not any(padding):
        return jax.lax.with_sharding_constraint(value, sharding)
    rest = [0] * (value.ndim - len(padding))
    padded = jnp.pad(value, [(0, after) for after in (*padding, *rest)])
    padded = jax.lax.with_sharding_constraint(padded, sharding)
    return jax.lax.slice(padded, (0,) * value.ndim, value.shape)


class Evaluator:
    """Evaluates a program under JAX's own tracing.

    Each equation is passed to the rules in order; the first one that returns results decides. If
    none does, it is evaluated as written: calls are inlined, and loops, branches and checkpoints
    are entered, so that rules see every equation outside of custom derivatives. Name scopes are
    preserved.

    Args:
        rules: what is not evaluated as written.
        numerics: the dtypes that values are stored in.
        weights: the variables that are parameters, and how they are prepared for use.
        constraints: shardings of results.
        scope: returns the name scopes that an equation is evaluated in.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        numerics: Numerics | None = None,
        weights: Weights = NO_WEIGHTS,
        constraints: Mapping[Var, NamedSharding] | None = None,
        scope: Callable[[Equation], str] = name_stack,
    ) -> None:
        self.numerics = numerics or Numerics()
        self.weights = weights
        self._rules: tuple[Rule, ...] = (*rules, enter)
        self._constraints = constraints or {}
        self._scope = scope

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluate a program."""
        env = self.environment(closed, args)
        self.equations(closed.jaxpr.eqns, env)
        return [env.value(atom) for atom in closed.jaxpr.outvars]

    def environment(self, closed: ClosedJaxpr, args: Sequence[Value]) -> Environment:
        """Return the environment a program starts with."""
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, args, strict=True))
        return Environment(self, values)

    def equations(self, eqns: Sequence[Equation], env: Environment) -> None:
        """Evaluate equations in order, adding their results to the environment."""
        for eqn in eqns:
            scope = self._scope(eqn)
            with jax.named_scope(scope) if scope else nullcontext():
                results = self.equation(eqn, env)
            env.values.update(zip(eqn.outvars, results, strict=True))

    def extend(self, values: MutableMapping[Var, Value], eqns: Sequence[Equation]) -> None:
        """Evaluate equations on values by variable, adding their results."""
        self.equations(eqns, Environment(self, values))

    def equation(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate one equation, and constrain the shardings of its results."""
        results = self._apply_rules(eqn, env, 0)
        return [
            constrained(v, result, self._constraints)
            for v, result in zip(eqn.outvars, results, strict=True)
        ]

    def continue_after(self, rule: Rule, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate an equation by the rules that come after ``rule``, which wraps them."""
        return self._apply_rules(eqn, env, self._rules.index(rule) + 1)

    def _apply_rules(self, eqn: Equation, env: Environment, first: int) -> list[Value]:
        for rule in self._rules[first:]:
            results = rule(eqn, env)
            if results is not None:
                return results
        return self.numerics.bind(eqn, env.operands(eqn))


ScanBody = Callable[[list[Value], list[Value]], tuple[list[Value], list[Value]]]
"""From the carry and an iteration's slices to the new carry and the iteration's results."""


def enter(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate an equation that contains a program; None for one that does not."""
    handler = _HANDLERS.get(eqn.primitive.name)
    return handler(eqn, env) if handler is not None else None


def enter_call(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate the body of a call inline."""
    return env.run(called_jaxpr(eqn), env.operands(eqn))


def entering(names: Collection[str]) -> Rule:
    """Return a rule that evaluates the bodies of these calls inline."""
    return lambda eqn, env: enter_call(eqn, env) if eqn.primitive.name in names else None


def enter_scan(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate a scan; its body by the same rules."""
    operands = env.operands(eqn)
    consts, _, _ = scan_parts(eqn, operands)
    return run_scan(eqn, operands, scan_body(eqn, consts, env))


def run_scan(eqn: Equation, operands: list[Value], body: ScanBody) -> list[Value]:
    """Run a body in place of the body of a scan equation."""
    _, init, xs = scan_parts(eqn, operands)
    carry, ys = jax.lax.scan(
        body,
        init,
        xs,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def unroll_scan(
    eqn: Equation,
    env: Environment,
    row: Callable[[Value, int], Value] = lambda stack, turn: stack[turn],
    stacked: Callable[[Sequence[Value]], Value] = jnp.stack,
) -> list[Value]:
    """Evaluate a scan one turn after the other.

    Args:
        eqn: the scan.
        env: has its operands.
        row: takes what a turn reads of a stack.
        stacked: makes a stack of what all turns return.
    """
    consts, carry, stacks = scan_parts(eqn, env.operands(eqn))
    turns, rows = range(eqn.params["length"]), list[list[Value]]()
    for turn in turns[::-1] if eqn.params["reverse"] else turns:
        slices = [row(stack, turn) for stack in stacks]
        out = env.run(eqn.params["jaxpr"], [*consts, *carry, *slices])
        rows.append(out[len(carry) :])
        carry = out[: len(carry)]
    if not rows:
        avals = map(aval_of, eqn.outvars[len(carry) :])
        return [*carry, *(jnp.zeros(aval.shape, aval.dtype) for aval in avals)]
    columns = zip(*(rows[::-1] if eqn.params["reverse"] else rows), strict=True)
    return [*carry, *map(stacked, columns)]


def scan_body(eqn: Equation, consts: list[Value], env: Environment) -> ScanBody:
    """Return the body of a scan as a function of carry and slices."""
    _, num_carry = scan_counts(eqn)

    def body(carry: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
        out = env.run(eqn.params["jaxpr"], [*consts, *carry, *xs])
        return out[:num_carry], out[num_carry:]

    return body


def enter_while(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate a while loop; its condition and body by the same rules."""
    operands = env.operands(eqn)
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
    return jax.lax.while_loop(
        lambda carry: env.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry])[0],
        lambda carry: env.run(eqn.params["body_jaxpr"], [*body_consts, *carry]),
        operands[num_cond + num_body :],
    )


def enter_cond(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate a cond; every branch by the same rules."""
    operands = env.operands(eqn)
    branches = [
        lambda *args, branch=branch: env.run(branch, args) for branch in eqn.params["branches"]
    ]
    return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def enter_remat(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate a checkpointed function, still checkpointed, by the same rules."""
    rematerialized = jax.checkpoint(
        lambda *args: env.run(called_jaxpr(eqn), args),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return list(rematerialized(*env.operands(eqn)))


_HANDLERS: dict[str, Callable[[Equation, Environment], list[Value]]] = {
    **dict.fromkeys(CALLS, enter_call),
    "scan": enter_scan,
    "while": enter_while,
    "cond": enter_cond,
    **dict.fromkeys(REMATS, enter_remat),
}
