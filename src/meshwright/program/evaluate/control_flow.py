"""Entering calls, loops, branches and checkpoints, so that rules see the equations inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Equation,
    Value,
    called_jaxpr,
    scan_counts,
)

if TYPE_CHECKING:
    from meshwright.program.evaluate.evaluator import Environment

ScanBody = Callable[[list[Value], list[Value]], tuple[list[Value], list[Value]]]
"""From the carry and an iteration's slices to the new carry and the iteration's results."""


def enter(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate an equation that contains a program; None for one that does not."""
    handler = _HANDLERS.get(eqn.primitive.name)
    return handler(eqn, env) if handler is not None else None


def enter_call(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate the body of a call inline."""
    return env.run(called_jaxpr(eqn), env.operands(eqn))


def enter_scan(eqn: Equation, env: Environment) -> list[Value]:
    """Evaluate a scan; its body by the same rules."""
    operands = env.operands(eqn)
    num_consts, _ = scan_counts(eqn)
    return run_scan(eqn, operands, scan_body(eqn, operands[:num_consts], env))


def run_scan(eqn: Equation, operands: list[Value], body: ScanBody) -> list[Value]:
    """Run a body in place of the body of a scan equation."""
    num_consts, num_carry = scan_counts(eqn)
    carry, ys = jax.lax.scan(
        body,
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


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
