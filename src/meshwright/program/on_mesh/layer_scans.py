"""Scans over stacked layers: weights gathered layer by layer, blocks under a remat policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from meshwright.program.blocks.segments import Block, cut_iteration, whole_program
from meshwright.program.evaluate.control_flow import ScanBody, run_scan, scan_body
from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.evaluate.weight_uses import WeightUse
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    scan_counts,
)
from meshwright.program.on_mesh.gather_ahead import after_last_block, run_block
from meshwright.program.on_mesh.remat import Remat


@dataclass(frozen=True)
class LayerScans:
    """Gathers the weights of a scan over stacked layers layer by layer, under a remat policy.

    Attributes:
        remat: what layers save for their backward pass.
        by_block: whether the blocks of an iteration of several are computed again one by one.
    """

    remat: Remat
    by_block: bool = False

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a scan over stacks of weights, or one that reads half-precision weights."""
        stacks, shared = stacked_weights(eqn, env), shared_weights(eqn, env)
        if not stacks and not shared:
            return None
        operands = [
            _stack(atom, stacks[number], env)
            if number in stacks
            else env.in_param_dtype(atom)
            if number in shared
            else env.read(atom)
            for number, atom in enumerate(eqn.invars)
        ]
        num_consts, _ = scan_counts(eqn)
        return run_scan(eqn, operands, self.body(eqn, operands[:num_consts], env))

    def body(self, eqn: Equation, consts: list[Value], env: Environment) -> ScanBody:
        """Return a scan's body; ``consts`` has half-precision weights in the parameter's dtype."""
        stacks, shared = stacked_weights(eqn, env), shared_weights(eqn, env)
        if not stacks and not shared:
            return scan_body(eqn, consts, env)
        _, num_carry = scan_counts(eqn)
        closed: ClosedJaxpr = eqn.params["jaxpr"]
        invars = closed.jaxpr.invars
        iteration = _Iteration(
            env.evaluator,
            closed,
            {invars[number]: use for number, use in stacks.items()},
            {invars[number] for number in shared},
            self.remat if stacks else Remat(),
            by_block=self.by_block,
        )

        def body(carry: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
            out = iteration([*consts, *carry, *xs])
            return out[:num_carry], out[num_carry:]

        return body


class _Iteration:
    """One iteration of a scan.

    Args:
        evaluator: evaluates its equations.
        closed: the body of the scan.
        stacks: the inputs that are layers of stacked weights.
        shared: the inputs that are half-precision weights of all layers, given in the parameter's
            dtype.
        remat: what a block saves for its backward pass.
        by_block: whether the blocks of an iteration of several are computed again one by one.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        closed: ClosedJaxpr,
        stacks: Mapping[Var, WeightUse],
        shared: Collection[Var],
        remat: Remat,
        *,
        by_block: bool,
    ) -> None:
        self._evaluator, self._closed, self._remat = evaluator, closed, remat
        self._stacks, self._shared = stacks, shared
        self._constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        divided = any(use.specs is not None for use in stacks.values())
        apart = by_block and remat.computes_again
        self._blocks = cut_iteration(closed.jaxpr) if apart else [whole_program(closed.jaxpr)]
        self._ahead = remat.gather_per_block and divided and len(self._blocks) > 1

    def __call__(self, inputs: Sequence[Value]) -> list[Value]:
        env = self._evaluator.environment(self._closed, inputs)
        handed_on: list[Value] = []
        for block in self._blocks:
            reads = [v for v in block.reads if v not in self._constants]
            weights = [v for v in reads if v in self._stacks]
            others = [v for v in reads if v not in self._stacks]
            values = [env.values[v] for v in weights], [env.value(v) for v in others]
            run = partial(self._run, block, weights, others)
            if self._remat.policy is None:
                results = run(*values)
            elif self._ahead:
                results, handed_on = run_block(run, self._remat.policy, *values, handed_on)
            else:
                # Without barriers, several blocks may be computed again at the same time.
                several = len(self._blocks) > 1
                run = jax.checkpoint(run, policy=self._remat.policy, prevent_cse=several)
                results = run(*values)
            if self._ahead and block is self._blocks[-1]:
                results = after_last_block(results, handed_on)
            env.values.update(zip(block.results, results, strict=True))
        return [env.value(atom) for atom in self._closed.jaxpr.outvars]

    def _run(
        self,
        block: Block,
        names_of_weights: Sequence[Var],
        names_of_others: Sequence[Var],
        weights: Sequence[Value],
        others: Sequence[Value],
    ) -> list[Value]:
        """Evaluate a block."""
        inner = dict(self._constants)
        inner.update(zip([*names_of_weights, *names_of_others], [*weights, *others], strict=True))
        prepared = {
            v: self._evaluator.weights.prepare_layer(inner[v], self._stacks[v])
            for v in names_of_weights
        }
        for v in names_of_others:
            if v in self._shared:
                prepared[v] = inner[v]
                inner[v] = inner[v].astype(aval_of(v).dtype)
        self._evaluator.equations(block.eqns, Environment(self._evaluator, inner, prepared))
        return [inner[v] for v in block.results]


def stacked_weights(eqn: Equation, env: Environment) -> dict[int, WeightUse]:
    """Return which operands of a scan are stacks of weights that it slices."""
    if eqn.primitive.name != "scan":
        return {}
    first, uses = sum(scan_counts(eqn)), env.evaluator.weights.uses
    return {
        number: uses[atom]
        for number, atom in enumerate(eqn.invars)
        if number >= first and not isinstance(atom, Literal) and atom in uses
    }


def shared_weights(eqn: Equation, env: Environment) -> set[int]:
    """Return which operands of a scan are half-precision weights that all iterations read."""
    if eqn.primitive.name != "scan":
        return set()
    num_consts, _ = scan_counts(eqn)
    return {n for n, atom in enumerate(eqn.invars[:num_consts]) if env.is_half_weight(atom)}


def _stack(atom: Atom, use: WeightUse, env: Environment) -> Value:
    """Return a stack of layers to scan over: divided, or gathered as a whole."""
    return (
        env.values[use.leaf] if env.evaluator.weights.gather_per_block else env.in_param_dtype(atom)
    )
