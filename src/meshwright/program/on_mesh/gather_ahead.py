"""Blocks whose weights are gathered again for the backward pass, one block ahead of their use.

A block's weights must not be gathered for the backward pass before it begins: all gathered weights
would be held at once. They should be gathered before the block's own turn, or devices wait for
them. So the gather waits until the gradient has reached the block *after* it. In the program this
order is a data dependency: a block hands its divided weights on to the next one, whose backward
pass returns them tied to its incoming gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from meshwright.program.jaxpr.equations import Value

Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Evaluates a block: from divided weights and other values to its results."""


@dataclass(frozen=True)
class _Pullback:
    """How the leaves of a pullback are put together again.

    Attributes:
        tree: its structure.
        weights: for each leaf the number of the weight that it is, or None.
    """

    tree: Any
    weights: tuple[int | None, ...]

    def __call__(self, weights: Sequence[Any], rest: Sequence[Any], cotangents: Any) -> Any:
        following = iter(rest)
        leaves = [next(following) if n is None else weights[n] for n in self.weights]
        return jax.tree.unflatten(self.tree, leaves)(cotangents)


def run_block(
    run: Run,
    policy: Callable[..., Any],
    weights: Sequence[Value],
    others: Sequence[Value],
    before: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """Return the results of a block, and its weights for the block after it.

    Args:
        run: evaluates the block.
        policy: what is saved for its backward pass, besides the divided weights.
        weights: its divided weights.
        others: what else it reads.
        before: the weights handed on by the block before it.
    """
    moving = [n for n, x in enumerate(others) if jnp.issubdtype(x.dtype, jnp.inexact)]
    saving = jax.checkpoint(run, policy=_but_casts_of(weights, policy), prevent_cse=False)

    @jax.custom_vjp
    def block(weights: Any, others: Any, before: Any) -> Any:
        del before
        return run(weights, others), weights

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
        return (results, weights), (Partial(_Pullback(tree, numbers)), weights, rest, before)

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback, weights, rest, before = saved
        of_results, handed_back = cotangents
        of_results = [_instantiated(c) for c in of_results]
        # Nothing is computed again before the gradient arrives, nor are the weights of the block
        # before this one gathered.
        of_results, rest, before = lax.optimization_barrier((of_results, rest, before))
        if any(isinstance(c, SymbolicZero) for c in handed_back):
            # The block after this one has no gradient.
            of_results, handed_back = lax.optimization_barrier((of_results, weights))
        of_weights, of_moving = pullback(handed_back, rest, of_results)
        given = dict(zip(moving, of_moving, strict=True))
        return of_weights, [given.get(n) for n in range(len(others))], before

    block.defvjp(forward, backward, symbolic_zeros=True)
    return block(list(weights), list(others), list(before))


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype)


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


def after_last_block(results: list[Value], handed_on: Sequence[Value]) -> list[Value]:
    """Return the results of the last block, whose weights may be gathered again from here on."""

    @jax.custom_vjp
    def end(results: Any, handed_on: Any) -> Any:
        del handed_on
        return results

    def forward(results: Any, handed_on: Any) -> Any:
        return lax.optimization_barrier((results, handed_on))

    def backward(handed_on: Any, cotangents: Any) -> Any:
        return cotangents, handed_on

    end.defvjp(forward, backward)
    return end(results, list(handed_on))
