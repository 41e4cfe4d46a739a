"""Blocks that gather their weights again for the backward pass, one block ahead."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.program.on_mesh.remat import choose_remat
from meshwright.program.on_mesh.run_blocks import after_last, run_ahead

NUM_BLOCKS = 4
POLICIES = {kind: choose_remat(kind, keep_gathered=False).policy for kind in ("none", "full")}


def block(weights, others):
    kernel, bias = weights
    x, shift, key = others
    drawn = jax.random.normal(key, x.shape, x.dtype)
    return [jnp.tanh(x @ kernel + bias) + jnp.roll(x, shift, axis=1) + drawn]


def plain(weights, x, stopped):
    for number, own in enumerate(weights):
        (y,) = block(own, [x, jnp.int32(number), jax.random.key(number)])
        x = x + (jax.lax.stop_gradient(y) if number in stopped else y)
    return (x**2).sum()


def ahead(weights, x, stopped, policy, in_turn=True):
    before = []
    for number, own in enumerate(weights):
        others = [x, jnp.int32(number), jax.random.key(number)]
        results, before = run_ahead(block, policy, own, others, before, in_turn=in_turn)
        if number == len(weights) - 1:
            results = after_last(results, before[0])
        (y,) = results
        x = x + (jax.lax.stop_gradient(y) if number in stopped else y)
    return (x**2).sum()


def inputs():
    drawn = np.random.default_rng(0)
    weights = [
        [jnp.asarray(drawn.normal(size=(6, 6))), jnp.asarray(drawn.normal(size=6))]
        for _ in range(NUM_BLOCKS)
    ]
    return weights, jnp.asarray(drawn.normal(size=(3, 6)))


EVERYDAY = (((1, 3), "none", True), ((1, 3), "full", False), ((), "full", True))


@pytest.mark.parametrize(
    ("stopped", "kind", "in_turn"),
    [
        pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.full)
        for case in itertools.product([(), (1, 3)], POLICIES, [True, False])
    ],
)
def test_gradients_are_those_of_plain_blocks(kind, stopped, in_turn):
    with jax.enable_x64(True):
        weights, x = inputs()
        found = jax.jit(
            jax.grad(lambda w, x: ahead(w, x, stopped, POLICIES[kind], in_turn), argnums=(0, 1))
        )(weights, x)
        expected = jax.grad(lambda w, x: plain(w, x, stopped), argnums=(0, 1))(weights, x)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def backward_pass(*, in_turn):
    weights, x = inputs()
    loss = partial(ahead, x=x, stopped=(), policy=POLICIES["none"], in_turn=in_turn)
    return jax.make_jaxpr(jax.grad(loss))(weights).jaxpr


def test_weights_wait_for_the_gradient_of_the_block_after_them():
    jaxpr = backward_pass(in_turn=False)
    kernels = jaxpr.invars[::2]
    # The last weights are released by the last block's results, the others by a gradient.
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    releases = [number for eqn in barriers for number, v in enumerate(kernels) if v in eqn.invars]
    assert releases == [3, 2, 1, 0]
    assert len(barriers) == 1 + NUM_BLOCKS
    # The barrier in the backward pass of block k holds the weights of block k - 1.
    for eqn, number in zip(barriers[1:], (2, 1, 0), strict=False):
        position = jaxpr.eqns.index(eqn)
        held = eqn.outvars[list(eqn.invars).index(kernels[number])]
        readers = [n for n, other in enumerate(jaxpr.eqns) if held in other.invars]
        following = jaxpr.eqns.index(barriers[barriers.index(eqn) + 1])
        assert position < following < min(readers)


@pytest.mark.parametrize("in_turn", [True, False])
def test_weights_wait_for_the_gradients_of_the_third_block_after_them(in_turn):
    jaxpr = backward_pass(in_turn=in_turn)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    selects = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "select_n"]
    conditions = [made_by[eqn.invars[0]] for eqn in selects]
    gradients = [made_by[condition.invars[0]].invars[0] for condition in conditions]
    # Of four blocks, only the first has a third one after it.
    assert gradients == (jaxpr.outvars[-2:] if in_turn else [])
