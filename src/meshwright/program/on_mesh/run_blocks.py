"""Running blocks under a checkpoint policy, with weights gathered one block ahead of their use.

The backward pass must not gather the weights of all blocks at once, or all of them would be in
memory together. Nor should it gather a block's weights only when the gradient reaches the block, or
devices would wait for them. So the gather starts when the gradient reaches the block *after* it.
In the program this order is a data dependency: a block passes its sharded weights to the next one,
whose backward pass returns them tied to its incoming gradient.

Gathers go before reductions where both could start, so the gradients of almost all blocks would
wait to be reduced, each of them whole. Where all activations are recomputed, none are saved whose
memory these gradients could take. There, the weights that a block's backward pass returns are also
tied to the reduced gradients of the block two after it, unless they are reduced over the data axis
as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from meshwright.program.blocks.block_lists import BlockSegment, Segment
from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.evaluate.weight_uses import Weights
from meshwright.program.jaxpr.equations import Value, Var
from meshwright.program.on_mesh.remat import Remat

_PassedOn = Sequence[Sequence[Value]]
"""A block's sharded weights, up to three times; nothing before the first block.

What the backward pass returns for them is: the weights themselves, once they may be gathered; the
reduced gradients of the block after this one; and those of the block after that one.
"""
Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Evaluates a block: from sharded weights and other values to its results."""


class RowsOf(NamedTuple):
    """Says that an argument of a block is the copies of a variable, and what shards them."""

    variable: Var
    axes: tuple[str, ...]


@dataclass(frozen=True)
class BlockRunner(ABC):
    """Evaluates the segments of a program in order, each block under the checkpoint policy.

    With ``prevent_cse``, barriers keep recomputed blocks apart, as in `jax.checkpoint`.
    """

    remat: Remat
    prevent_cse: bool = True

    @abstractmethod
    def arguments(self, block: BlockSegment, env: Environment) -> dict[Any, Value]:
        """Return what a block is called with, by variable."""

    @abstractmethod
    def gathered(self, block: BlockSegment, weights: Weights) -> Collection[Var]:
        """Return the arguments that are sharded weights which the block gathers one block ahead."""

    @abstractmethod
    def inside(self, arguments: Mapping[Any, Value], evaluator: Evaluator) -> Environment:
        """Return the environment that a block with these arguments is evaluated in."""

    def run(self, segments: Sequence[Segment], env: Environment) -> None:
        """Evaluate segments, adding their results to the environment."""
        last = next((s for s in reversed(segments) if isinstance(s, BlockSegment)), None)
        passed_on: _PassedOn = ()
        for segment in segments:
            if not isinstance(segment, BlockSegment):
                env.evaluator.equations(segment.eqns, env)
                continue
            arguments = self.arguments(segment, env)
            gathered = self.gathered(segment, env.evaluator.weights)
            weights = {v: x for v, x in arguments.items() if v in gathered}
            others = {v: x for v, x in arguments.items() if v not in gathered}
            run = partial(self._evaluate, segment, [*weights, *others], env.evaluator)
            values = list(weights.values()), list(others.values())
            if self.remat.policy is None:
                results = run(*values)
            elif gathered:
                in_turn = self._in_turn(env.evaluator.weights)
                results, passed_on = run_ahead(
                    run, self.remat.policy, *values, passed_on, in_turn=in_turn
                )
                results = after_last(results, passed_on[0]) if segment is last else results
            else:
                saving = jax.checkpoint(run, policy=self.remat.policy, prevent_cse=self.prevent_cse)
                results = saving(*values)
            env.values.update(zip(segment.results, results, strict=True))

    def _in_turn(self, weights: Weights) -> bool:
        """Whether weights are gathered only when gradients of later blocks have been reduced."""
        copies = 1 if weights.mesh is None else weights.mesh.auto_axes.get("data", 1)
        return self.remat.policy is jax.checkpoint_policies.nothing_saveable and copies == 1

    def _evaluate(
        self,
        block: BlockSegment,
        names: Sequence[Any],
        evaluator: Evaluator,
        weights: Sequence[Value],
        others: Sequence[Value],
    ) -> list[Value]:
        inner = self.inside(dict(zip(names, [*weights, *others], strict=True)), evaluator)
        evaluator.equations(block.eqns, inner)
        return [inner.values[v] for v in block.results]


@dataclass(frozen=True)
class _Pullback:
    """How a pullback is rebuilt from its leaves, some of which are weights, by number."""

    tree: Any
    weights: tuple[int | None, ...]

    def __call__(self, weights: Sequence[Any], rest: Sequence[Any], cotangents: Any) -> Any:
        following = iter(rest)
        leaves = [next(following) if n is None else weights[n] for n in self.weights]
        return jax.tree.unflatten(self.tree, leaves)(cotangents)


def run_ahead(
    run: Run,
    policy: Callable[..., Any],
    weights: Sequence[Value],
    others: Sequence[Value],
    before: _PassedOn,
    *,
    in_turn: bool,
) -> tuple[list[Value], _PassedOn]:
    """Return the results of a block that gathers its weights, and these for the block after it.

    It saves what the policy says, besides its sharded weights. What the block ``before`` passed on
    are weights too, and ``others`` what else it reads. If ``in_turn``, weights wait until the
    gradients of later blocks have been reduced.
    """
    copies = 3 if in_turn else 1
    moving = [n for n, x in enumerate(others) if jnp.issubdtype(x.dtype, jnp.inexact)]
    saving = jax.checkpoint(run, policy=_but_casts_of(weights, policy), prevent_cse=False)

    @jax.custom_vjp
    def block(weights: Any, others: Any, before: Any) -> Any:
        del before
        return run(weights, others), [weights] * copies

    def forward(weights: Any, others: Any, before: Any) -> Any:
        weights, others, before = jax.tree.map(
            lambda x: x.value, (weights, others, before), is_leaf=lambda x: hasattr(x, "perturbed")
        )

        def of_moving(weights: Any, chosen: Any) -> Any:
            given = dict(zip(moving, chosen, strict=True))
            return saving(weights, [given.get(n, x) for n, x in enumerate(others)])

        results, pullback = jax.vjp(of_moving, weights, [others[n] for n in moving])
        leaves, tree = jax.tree.flatten(pullback)
        numbers = tuple(next((n for n, w in enumerate(weights) if w is x), None) for x in leaves)
        rest = [x for x, n in zip(leaves, numbers, strict=True) if n is None]
        saved = Partial(_Pullback(tree, numbers)), weights, rest, before[0] if before else []
        return (results, [weights] * copies), saved

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback, weights, rest, before = saved
        of_results, (returned, *of_later) = cotangents
        zero = [isinstance(c, SymbolicZero) for c in of_results]
        pairs = zip(of_results, zero, strict=True)
        of_results = [jnp.zeros(c.shape, c.dtype) if is_zero else c for c, is_zero in pairs]
        # Nothing is recomputed before the gradient arrives, nor are the weights of the block before
        # this one gathered.
        of_results, rest, before = lax.optimization_barrier((of_results, rest, before))
        if any(isinstance(c, SymbolicZero) for c in returned):
            # The block after this one has no gradient.
            of_results, returned = lax.optimization_barrier((of_results, weights))
        of_weights, of_moving = pullback(returned, rest, of_results)
        given = dict(zip(moving, of_moving, strict=True))
        passed_on = [before]
        if in_turn:
            of_next, of_second = (_like(before, gradients) for gradients in of_later)
            ready = [_after(w, g) for w, g in zip(before, of_second, strict=True)]
            passed_on = [ready, _like(before, of_weights), of_next]
        return of_weights, [given.get(n) for n in range(len(others))], passed_on if before else []

    block.defvjp(forward, backward, symbolic_zeros=True)
    return block(list(weights), list(others), list(before))


def _like(weights: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients of the same weights of another block, None where it has none."""
    if len(weights) != len(gradients):
        return [None] * len(weights)
    pairs = zip(weights, gradients, strict=True)
    same = [(w.shape, w.dtype) == (g.shape, g.dtype) for w, g in pairs]
    known = [not isinstance(g, SymbolicZero) for g in gradients]
    return [g if a and b else None for g, a, b in zip(gradients, same, known, strict=True)]


def _after(weight: Any, gradient: Any) -> Any:
    """Return a weight that is not known before a gradient is, if there is one.

    The compiler for GPUs drops barriers before it schedules, but it does not see that the condition
    is never true.
    """
    if gradient is None:
        return weight
    never = (gradient != gradient) & (gradient == 0)
    return lax.select(never, jnp.zeros_like(weight), weight)


def _but_casts_of(weights: Sequence[Value], policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy that does not save weights that are cast, only weights as they are.

    What is saved besides weights waits for the block's own gradient.
    """
    kinds = {(x.shape, x.dtype) for x in weights}

    def saves(primitive: Any, *inputs: Any, **params: Any) -> Any:
        is_cast = primitive.name == "convert_element_type"
        if is_cast and (inputs[0].shape, inputs[0].dtype) in kinds:
            return False
        return policy(primitive, *inputs, **params)

    return saves


def after_last(results: list[Value], passed_on: Sequence[Value]) -> list[Value]:
    """Return the results of the last block; the backward pass gathers its weights from here on."""
    end: Any = jax.custom_vjp(lambda results, _: results)
    end.defvjp(
        lambda *operands: lax.optimization_barrier(operands),
        lambda passed_on, cotangents: (cotangents, passed_on),
    )
    return end(results, list(passed_on))
