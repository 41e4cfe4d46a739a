"""A jaxpr run equation by equation gives what JAX gives, and a pass sees every equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program.programs import equations, modules_by_primitive, quick

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import CALLS
from meshwright.program.trace.normalize import normalize

X = np.linspace(0.1, 1.0, 6, dtype=np.float32).reshape(2, 3)


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


@own_jvp.defjvp
def _own_jvp(primals, tangents):
    return own_jvp(*primals), 3 * tangents[0]


@jax.custom_vjp
def own_vjp(x):
    return jnp.cos(x)


own_vjp.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (5 * g,))


def control_flow(x):
    x = jax.jit(lambda x: jnp.exp(x) * 0.5)(x)
    x, ys = jax.lax.scan(
        lambda c, i: (jnp.tanh(c) * i, c.sum()), x, jnp.arange(1.0, 4.0), reverse=True
    )
    x = jax.lax.fori_loop(0, 3, lambda i, x: x * 1.5 + i, x)
    x = jax.lax.while_loop(lambda x: x.sum() < 30, lambda x: x * 2, x)
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x = jax.lax.switch(ys.argmax(), [lambda x: x, lambda x: 2 * x, lambda x: 3 * x], x)
    return x.sum() + ys.sum()


def derivatives(x):
    x = own_vjp(own_jvp(x))
    policy = jax.checkpoint_policies.dots_saveable
    x = jax.checkpoint(lambda x: jnp.sin(x @ x.T), policy=policy)(x)
    x, _ = jax.lax.scan(lambda c, _: (own_jvp(c), None), x, length=2)
    return jax.nn.relu(x).sum() + jax.nn.logsumexp(x)


def evaluated(function, evaluator=None):
    closed = jax.make_jaxpr(function)(X)
    return lambda x: (evaluator or Evaluator()).run(closed, [x])[0]


def test_loops_and_branches_give_the_same_value():
    expected = pytest.approx(float(quick(control_flow)(X)), rel=1e-6)
    assert float(quick(evaluated(control_flow))(X)) == expected


def test_gradients_are_the_same_with_own_derivatives_and_checkpoints():
    np.testing.assert_allclose(
        quick(jax.grad(evaluated(derivatives)))(X), quick(jax.grad(derivatives))(X), rtol=1e-6
    )


def test_several_results_and_integers_pass_through():
    def function(x):
        values, order = jax.lax.top_k(x, 2)
        return values, order, x.astype(jnp.int32), jnp.uint32(7)

    closed = jax.make_jaxpr(function)(X)
    for ours, theirs in zip(Evaluator().run(closed, [X]), function(X), strict=True):
        assert ours.dtype == theirs.dtype
        assert jnp.array_equal(ours, theirs)


def test_rules_see_every_equation_of_loops_branches_and_calls():
    seen = []

    def count(eqn, env):
        seen.append(eqn.primitive.name)

    jax.make_jaxpr(evaluated(control_flow, Evaluator([count])))(X)
    written = [e.primitive.name for e, _ in equations(jax.make_jaxpr(control_flow)(X).jaxpr)]
    entered = {"scan", "while", "cond", *CALLS}
    # JAX may trace a body more than once; every equation is seen at least once.
    assert set(written) | entered == set(seen) | entered
    assert len(seen) >= len(written)


def test_the_first_rule_that_answers_decides():
    def tangent(eqn, env):
        return [jnp.tan(*env.operands(eqn))] if eqn.primitive.name == "sin" else None

    def never(eqn, env):
        assert eqn.primitive.name != "sin"

    function = evaluated(lambda x: jnp.cos(jnp.sin(x)), Evaluator([tangent, never]))
    np.testing.assert_allclose(function(X), jnp.cos(jnp.tan(X)), rtol=1e-6)


def test_a_rule_can_wrap_the_rules_after_it():
    def twice(eqn, env):
        if eqn.primitive.name != "sin":
            return None
        (x,) = env.operands(eqn)
        (result,) = env.evaluator.continue_after(twice, eqn, env.with_operands(eqn, [2 * x]))
        return [result + 1]

    def tangent(eqn, env):
        return [jnp.tan(*env.operands(eqn))] if eqn.primitive.name == "sin" else None

    function = evaluated(jnp.sin, Evaluator([twice, tangent]))
    np.testing.assert_allclose(function(X), jnp.tan(2 * X) + 1, rtol=1e-6)


def test_checkpoints_stay_checkpoints():
    closed = jax.make_jaxpr(evaluated(derivatives))(X)
    (remat,) = (e for e in closed.jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2"))
    assert remat.params["policy"] is jax.checkpoint_policies.dots_saveable


def test_name_scopes_are_kept_inside_and_outside_of_loops():
    def function(x):
        with jax.named_scope("~outer"):
            x = jnp.sin(x)

            def body(c, _):
                with jax.named_scope("~outer.inner"):
                    return jnp.cos(c), None

            x, _ = jax.lax.scan(body, x, length=2)
        return jnp.tanh(x)

    once = jax.make_jaxpr(evaluated(function))(X)
    twice = normalize(normalize(once))
    for closed in (once, twice):
        found = modules_by_primitive(closed)
        assert (found["sin"], found["cos"], found["tanh"]) == (["outer"], ["outer.inner"], [""])
