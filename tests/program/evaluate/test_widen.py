"""A widened program computes in float64 whatever the model's own code says, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.programs import assert_close, differentiate, equations, quick, trace
from small_models import (
    VOCABULARY,
    WIDTH,
    Norms,
    double,
    fill,
    numbers,
    plain_gradients,
    square_loss,
    task_batch,
    vectors,
)

from meshwright.models.attention import causal_mask
from meshwright.models.gpt import Attention
from meshwright.program.evaluate.widen import is_narrow, wide_evaluator, widen


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def narrow(function, *inputs):
    """Trace a function as it is without float64."""
    with jax.enable_x64(False):
        return jax.make_jaxpr(function)(*inputs)


def widened(function, *inputs):
    """Return a function evaluated in float64 although it was traced in float32."""
    closed = narrow(function, *inputs)
    return lambda *args: wide_evaluator().run(closed, [widen(a) for a in args])


X = numbers(4, 6)


class Exact(nnx.Module):
    """Lookup, attention, recurrence and a kinked layer, every constant a power of two.

    Constants are traced in float32, so only such a model has the same ones in float64.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=2**-16, rngs=rngs)
        heads = {"num_heads": 4, "num_kv_heads": 2, "qkv": "separate", "out_std": 0.1}
        self.attention = Attention(hidden_size=WIDTH, **heads, rngs=rngs)
        self.recurrent = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), causal_mask(tokens.shape[1]))
        x = jax.nn.relu(x)
        kernel, bias = self.recurrent.kernel[...], self.recurrent.bias[...]
        step = lambda c, x: (jnp.tanh(x + c @ kernel + bias), c)  # noqa: E731
        _, y = jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1)[1:])
        return self.head(x) + self.embed.attend(y.sum(axis=0))[:, None]


def test_a_half_precision_model_agrees_with_the_same_model_built_in_float64():
    loss, batch = task_batch("gpt", samples=4)
    with jax.enable_x64(False):
        model = fill(Exact)
    graphdef, state = nnx.split(double(model))
    reference = quick(lambda s, b: plain_gradients(nnx.merge(graphdef, s), loss, b))
    expected, gradients = reference(state, batch)
    with jax.enable_x64(False):
        model_leaves, traced = trace(Exact, loss, batch, jnp.bfloat16)
        values = model_leaves.values(model)
    run = lambda inputs: wide_evaluator().run(traced.closed, inputs)  # noqa: E731
    value, _, leaves = differentiate(run, traced, list(map(widen, values)), batch)
    assert value.dtype == jnp.float64
    assert abs(value - expected) <= 1e-12 * abs(expected)
    assert_close({path: leaves[path] for path in gradients}, gradients, 1e-12)


def test_dropout_draws_the_bits_of_the_narrow_run():
    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0)

    key = jax.random.key(3)
    (wide,) = quick(widened(drop, X, key))(X, key)
    with jax.enable_x64(False):
        expected = quick(drop)(X, key)
    assert wide.dtype == jnp.float64
    assert jnp.array_equal(wide, expected.astype(jnp.float64))


def test_uniform_and_normal_numbers_are_the_narrow_ones_to_rounding():
    def draw(key):
        return jax.random.uniform(key, (50,)), jax.random.normal(key, (50,))

    key = jax.random.key(4)
    uniform, normal = quick(widened(draw, key))(key)
    with jax.enable_x64(False):
        expected = quick(draw)(key)
    assert jnp.array_equal(uniform, expected[0].astype(jnp.float64))
    np.testing.assert_allclose(normal, expected[1], rtol=1e-5, atol=1e-7)


def test_batch_statistics_and_streams_of_a_model_are_those_of_the_narrow_run():
    with jax.enable_x64(False):
        model_leaves, traced = trace(Norms, square_loss, vectors())
        values = model_leaves.values(fill(Norms))
        expected = traced.read_outputs(
            quick(jax.extend.core.jaxpr_as_fun(traced.closed))(*values, *vectors().values())
        )
    outputs = quick(lambda x: wide_evaluator().run(traced.closed, x))(
        [*values, *vectors().values()]
    )
    state = traced.read_outputs(outputs).state
    for leaf, ours, theirs in zip(
        [model_leaves.leaves[i] for i in model_leaves.indices("state")],
        state,
        expected.state,
        strict=True,
    ):
        if leaf.variable == "BatchStat":
            assert ours.dtype == jnp.float64
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
        else:
            assert (ours.dtype, bool((ours == theirs).all())) == (leaf.dtype, True)


def test_integers_booleans_and_keys_are_untouched():
    def function(x, i, key):
        small = jnp.asarray(i, jnp.int8)
        return small + 1, i * 2, x > 0, jax.random.fold_in(key, i[0]), jnp.argmax(x), small.sum()

    inputs = (X, jnp.arange(3, dtype=jnp.int32), jax.random.key(0))
    closed = narrow(function, *inputs)
    results = wide_evaluator().run(closed, inputs)
    assert [r.dtype for r in results] == [aval.dtype for aval in closed.out_avals]
    with jax.enable_x64(False):
        for ours, theirs in zip(results, function(*inputs), strict=True):
            assert (ours == theirs).all()


def test_formats_written_into_the_model_are_widened():
    def function(x):
        y = x.astype(jnp.bfloat16) @ x.astype(jnp.float16).T.astype(jnp.bfloat16)
        y = jax.lax.dot_general(y, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.lax.reduce_precision(y, 8, 7) + jnp.arange(4, dtype=jnp.float16)

    (wide,) = widened(function, X)(X)
    x = np.asarray(X, np.float64)
    np.testing.assert_allclose(wide, (x @ x.T) @ (x @ x.T) + np.arange(4), rtol=1e-14)


def test_constants_keep_the_value_they_were_written_with():
    table = np.linspace(0, 1, 6, dtype=np.float32)
    (wide,) = widened(lambda x: x * 0.1 + table, X)(X)
    expected = np.asarray(X, np.float64) * np.float64(np.float32(0.1)) + np.float64(table)
    np.testing.assert_allclose(wide, expected, rtol=1e-15)


def test_attention_softmax_is_widened():
    query = numbers(2, 5, 2, 4)

    def attention(q):
        return jax.nn.dot_product_attention(q, q, q, is_causal=True)

    (wide,) = quick(widened(attention, query))(query)
    q = np.asarray(query, np.float64)
    scores = np.einsum("bthc,bshc->bhts", q, q) / 2
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(wide, np.einsum("bhts,bshc->bthc", weights, q), rtol=1e-12)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def clipped(x, limit):
    return jnp.minimum(x, limit)


@clipped.defjvp
def _clipped(primals, tangents):
    return clipped(*primals), tangents[0] * jnp.where(primals[0] < primals[1], 1.0, 0.25)


def test_a_straight_through_estimator_keeps_its_gradient():
    run = widened(lambda x: (straight_through(3 * x) ** 2).sum(), X)
    gradient = jax.grad(lambda x: run(x)[0])(widen(X))
    x = np.asarray(X, np.float64)
    np.testing.assert_allclose(gradient, 2 * np.round(3 * x) * np.cos(3 * x) * 3, rtol=1e-12)


@jax.custom_vjp
def weighted(x):
    return jnp.tanh(x) * jnp.ones(x.shape) / 2


def _weighted_forward(x):
    weight = jnp.ones(x.shape) / 2  # Of 64 bits in a 64-bit mode, unlike its primal.
    return jnp.tanh(x) * weight, (x, weight * jnp.arange(x.shape[-1]))


weighted.defvjp(_weighted_forward, lambda saved, g: (g * saved[1] / jnp.cosh(saved[0]) ** 2,))


def test_a_forward_rule_that_makes_arrays_without_a_dtype():
    run = widened(lambda x: weighted(x).sum(), X)
    gradient = jax.grad(lambda x: run(x)[0])(widen(X))
    x = np.asarray(X, np.float64)
    expected = 0.5 * np.arange(x.shape[-1]) / np.cosh(x) ** 2
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_a_custom_jvp_with_an_integer_argument_keeps_its_derivative():
    limit = jnp.zeros((), jnp.int32)
    run = widened(lambda x: (clipped(jnp.tanh(x), limit) ** 2).sum(), X)
    gradient = jax.jit(jax.grad(lambda x: run(x)[0]))(widen(X))
    y = np.tanh(np.asarray(X, np.float64))
    expected = 2 * np.minimum(y, 0) * np.where(y < 0, 1, 0.25) * (1 - y**2)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-16)


def test_loops_branches_and_checkpoints_are_widened_inside():
    def function(x):
        x, ys = jax.lax.scan(
            lambda c, i: (jnp.sin(c) * i, c.sum()), x, jnp.arange(1.0, 4.0), unroll=2
        )
        x = jax.lax.fori_loop(0, 3, lambda i, x: x * 1.1 + i, x)
        x = jax.lax.cond(x.sum() > 0, lambda x: x / 3, lambda x: x / 7, x)
        x = jax.checkpoint(lambda x: jnp.exp(-x))(x)
        return x.sum() + ys.sum() + jax.nn.relu(x).mean()

    run = quick(widened(function, X))
    program = jax.make_jaxpr(widened(function, X))(X)
    formats = {v.aval.dtype for e, _ in equations(program.jaxpr) for v in e.outvars}
    assert not formats & {jnp.dtype("float32"), jnp.dtype("bfloat16")}
    gradient = quick(jax.grad(lambda x: widened(function, X)(x)[0]))(widen(X))
    step, direction = 1e-5, np.asarray(numbers(4, 6, seed=9), np.float64)
    difference = run(X + step * direction)[0] - run(X - step * direction)[0]
    np.testing.assert_allclose(difference / (2 * step), (gradient * direction).sum(), rtol=1e-8)


def test_complex_numbers_are_widened():
    (wide,) = widened(lambda x: jnp.abs(jnp.fft.fft(x.astype(jnp.complex64))), X)(X)
    np.testing.assert_allclose(wide, np.abs(np.fft.fft(np.asarray(X, np.float64))), rtol=1e-12)


def test_what_is_narrow():
    assert all(is_narrow(jnp.ones(1, d)) for d in ("float32", "bfloat16", "float16"))
    others = (jnp.ones(1), jnp.ones(1, int), jax.random.key(0), True, None, 3)
    assert not any(map(is_narrow, others))
    assert widen(np.float32(1.5)).dtype == jnp.float64


@pytest.mark.parametrize("method", ["add", "multiply", "min", "max", "set"])
def test_scatters_combine_in_float64(method):
    def function(x, i):
        return getattr((3 * x).at[i], method)(x[:3] / 7)

    numbers_of_rows = np.asarray([1, 3, 1 if method != "set" else 2], np.int32)
    (wide,) = quick(widened(function, X, numbers_of_rows))(X, numbers_of_rows)
    x = np.asarray(X, np.float64)
    expected = 3 * x
    combine = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}
    if method == "set":
        expected[numbers_of_rows] = x[:3] / 7
    else:
        combine[method].at(expected, numbers_of_rows, x[:3] / 7)
    assert wide.dtype == jnp.float64
    np.testing.assert_allclose(wide, expected, rtol=1e-14)


def test_linear_systems_are_solved_in_float64():
    matrix, right = numbers(6, 6) + 3 * np.eye(6, dtype=np.float32), numbers(6, 2)
    (wide,) = quick(widened(jnp.linalg.solve, matrix, right))(matrix, right)
    expected = np.linalg.solve(np.asarray(matrix, np.float64), np.asarray(right, np.float64))
    np.testing.assert_allclose(wide, expected, rtol=1e-12)


# Other draws are compared every day; gamma variates come from a loop that compiles long.
@pytest.mark.full
@pytest.mark.parametrize("draw", [jax.random.gamma, jax.random.loggamma])
def test_gamma_variates_are_the_narrow_ones_and_their_derivative_is_not(draw):
    alpha, key = np.linspace(0.5, 3, 8, dtype=np.float32), jax.random.key(2)
    (wide,) = quick(widened(draw, key, alpha))(key, alpha)
    slope = quick(jax.grad(lambda a: widened(draw, key, alpha)(key, a)[0].sum()))(widen(alpha))
    with jax.enable_x64(False):
        expected = quick(draw)(key, alpha)
        narrow_slope = quick(jax.grad(lambda a: draw(key, a).sum()))(alpha)
    assert jnp.array_equal(wide, expected.astype(jnp.float64))
    assert slope.dtype == jnp.float64
    np.testing.assert_allclose(slope, narrow_slope, rtol=1e-4)
