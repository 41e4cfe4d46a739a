"""Running a jaxpr equation by equation, so that passes can change what happens at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwright.program.jaxprs import (
    CALLS,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    bind,
    called_jaxpr,
    name_stack,
    scan_counts,
)

Environment = dict[Var, Any]
ScanBody = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


class Interpreter:
    """Evaluates a jaxpr under JAX's own tracing; a pass overrides the method it cares about.

    Calls are inlined, loops and branches are entered, so that a pass sees every equation outside
    of custom derivatives. Name scopes are kept.
    """

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Evaluate a closed jaxpr."""
        return self.evaluate(closed.jaxpr, closed.consts, args)

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr with its constants and arguments."""
        env: Environment = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        self.equations(jaxpr.eqns, env)
        return [self.read(atom, env) for atom in jaxpr.outvars]

    def equations(self, eqns: Sequence[Equation], env: Environment) -> None:
        """Evaluate equations in order, adding their results to the environment."""
        for eqn in eqns:
            args = self.operands(eqn, env)
            scope = self.scope(eqn)
            if scope:
                with jax.named_scope(scope):
                    results = self.equation(eqn, args)
            else:
                results = self.equation(eqn, args)
            env.update(zip(eqn.outvars, results, strict=True))

    def operands(self, eqn: Equation, env: Environment) -> list[Any]:
        """Return the values an equation works on."""
        return [self.read(atom, env) for atom in eqn.invars]

    def scope(self, eqn: Equation) -> str:
        """Return the name scopes an equation is evaluated in."""
        return name_stack(eqn)

    def read(self, atom: Var | Literal, env: Environment) -> Any:
        """Return the value of a variable or literal."""
        return atom.val if isinstance(atom, Literal) else env[atom]

    def equation(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate one equation."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.run(called_jaxpr(eqn), args)
        rule = getattr(self, f"enter_{name}", None)
        return rule(eqn, args) if rule else self.leaf(eqn, args)

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate an equation that contains no other."""
        return bind(eqn, args)

    def enter_scan(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a scan with the pass applied to its body."""
        num_consts, num_carry = scan_counts(eqn)
        carry, ys = jax.lax.scan(
            self.scan_body(eqn, args[:num_consts]),
            args[num_consts : num_consts + num_carry],
            args[num_consts + num_carry :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *ys]

    def scan_body(self, eqn: Equation, consts: list[Any]) -> ScanBody:
        """Return the body of a scan as a function of carry and slices."""
        _, num_carry = scan_counts(eqn)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self.run(eqn.params["jaxpr"], [*consts, *carry, *xs])
            return out[:num_carry], out[num_carry:]

        return body

    def enter_while(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a while loop with the pass applied to its condition and body."""
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts = args[:num_cond], args[num_cond : num_cond + num_body]
        return jax.lax.while_loop(
            lambda carry: self.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry])[0],
            lambda carry: self.run(eqn.params["body_jaxpr"], [*body_consts, *carry]),
            args[num_cond + num_body :],
        )

    def enter_cond(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a branch with the pass applied to every alternative."""
        branches = [
            lambda *operands, branch=branch: self.run(branch, operands)
            for branch in eqn.params["branches"]
        ]
        return list(jax.lax.switch(args[0], branches, *args[1:]))

    def enter_remat2(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a checkpointed function, still checkpointed, with the pass applied."""
        rematerialized = jax.checkpoint(
            lambda *operands: self.run(called_jaxpr(eqn), operands),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return list(rematerialized(*args))

    enter_checkpoint = enter_remat2
