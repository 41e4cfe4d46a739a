"""A jaxpr run equation by equation gives what JAX gives, and a pass sees every equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program.programs import equations, modules_by_primitive, quick

from meshwright.program.interpret import Interpreter
from meshwright.program.jaxprs import CALLS
from meshwright.program.normalize import normalize

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


def interpreted(function, interpreter=None):
    closed = jax.make_jaxpr(function)(X)
    return lambda x: (interpreter or Interpreter()).run(closed, [x])[0]


def test_loops_and_branches_give_the_same_value():
    expected = pytest.approx(float(quick(control_flow)(X)), rel=1e-6)
    assert float(quick(interpreted(control_flow))(X)) == expected


def test_gradients_are_the_same_with_own_derivatives_and_checkpoints():
    np.testing.assert_allclose(
        quick(jax.grad(interpreted(derivatives)))(X), quick(jax.grad(derivatives))(X), rtol=1e-6
    )


def test_several_results_and_integers_pass_through():
    def function(x):
        values, order = jax.lax.top_k(x, 2)
        return values, order, x.astype(jnp.int32), jnp.uint32(7)

    closed = jax.make_jaxpr(function)(X)
    for ours, theirs in zip(Interpreter().run(closed, [X]), function(X), strict=True):
        assert ours.dtype == theirs.dtype
        assert jnp.array_equal(ours, theirs)


class Counting(Interpreter):
    def __init__(self):
        self.seen = []

    def leaf(self, eqn, args):
        self.seen.append(eqn.primitive.name)
        return super().leaf(eqn, args)


def test_a_pass_sees_every_equation_of_loops_branches_and_calls():
    counting = Counting()
    jax.make_jaxpr(interpreted(control_flow, counting))(X)
    written = [e.primitive.name for e, _ in equations(jax.make_jaxpr(control_flow)(X).jaxpr)]
    entered = {"scan", "while", "cond", *CALLS}
    expected = sorted(name for name in written if name not in entered)
    # JAX may trace a body more than once; every equation is seen at least once.
    assert set(expected) == set(counting.seen)
    assert len(counting.seen) >= len(expected)


def test_checkpoints_stay_checkpoints():
    closed = jax.make_jaxpr(interpreted(derivatives))(X)
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

    once = jax.make_jaxpr(interpreted(function))(X)
    twice = normalize(normalize(once))
    for closed in (once, twice):
        found = modules_by_primitive(closed)
        assert (found["sin"], found["cos"], found["tanh"]) == (["outer"], ["outer.inner"], [""])
