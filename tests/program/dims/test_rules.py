"""Every rule names the right classes, and the classes mean what they say.

A case writes the dims of inputs and outputs as letters, one per class: ``a(bc)->abc`` is a reshape
that splits a dim in two. ``!`` marks a class some operation needs whole. The meaning is checked by
permuting a class wherever it occurs in the inputs: the outputs must be permuted alike.
"""

import string

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.program.dims.calls import RULES as CALL_RULES
from meshwright.program.dims.classes import LeafLabel, find_dim_classes
from meshwright.program.dims.walk import RULES

KEY = np.random.default_rng(0)


def f(*shape):
    return KEY.normal(size=shape).astype(np.float32)


def i(limit, *shape):
    return KEY.integers(0, limit, size=shape).astype(np.int32)


def conv(groups=1, **kwargs):
    defaults = {"window_strides": (1,), "padding": "SAME"}
    numbers = ("NWC", "WIO", "NWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, **(defaults | kwargs), dimension_numbers=numbers, feature_group_count=groups
    )


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


CASES = {
    "elementwise": (lambda x, y: jnp.tanh(x) * y + 2, (f(3, 4), f(3, 4)), "ab,ab->ab"),
    "size-1 dims are repeated": (lambda x, y: lax.sub(x, y), (f(3, 4), f(3, 1)), "ab,a1->ab"),
    "select": (lambda c, x, y: jnp.where(c > 0, x, y), (f(3, 4), f(3, 4), f(3, 4)), "ab,ab,ab->ab"),
    "clamp": (lambda x: jnp.clip(x, 0, 1), (f(3, 4),), "ab->ab"),
    "cast": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (f(3, 4),), "ab->ab"),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (f(3, 4),), "ab->ab"),
    "barrier": (lambda x, y: lax.optimization_barrier((y, x)), (f(2), f(3)), "a,b->b,a"),
    "dot": (lambda x, w: x @ w, (f(3, 4), f(4, 5)), "ab,bc->ac"),
    "batched dot": (
        lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k),
        (f(2, 3, 4, 5), f(2, 6, 4, 5)),
        "abcd,aecd->acbe",
    ),
    "ragged dot": (
        lambda x, w, g: lax.ragged_dot(x, w, g),
        (f(7, 4), f(3, 4, 5), np.array([2, 4, 1], np.int32)),
        "a!b,c!bd,c!->a!d",
    ),
    "convolution": (conv(), (f(2, 7, 4), f(3, 4, 5)), "ab!c,d!ce->af!e"),
    "1-wide convolution": (conv(), (f(2, 7, 4), f(1, 4, 5)), "abc,1cd->abd"),
    "grouped convolution": (conv(2), (f(2, 7, 6), f(3, 3, 10)), "ab!(cd),e!d(cf)->ag!(cf)"),
    "depthwise convolution": (conv(4), (f(2, 7, 4), f(3, 1, 4)), "ab!c,d!1c->ae!c"),
    "transpose": (lambda x: x.transpose(2, 0, 1), (f(2, 3, 4),), "abc->cab"),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (3, 5, 4)), (f(3, 4),), "ab->acb"),
    "split a dim": (lambda x: x.reshape(3, 2, 4), (f(3, 8),), "a(bc)->abc"),
    "merge dims": (lambda x: x.reshape(3, 8), (f(3, 2, 4),), "abc->a(bc)"),
    "regroup dims": (lambda x: x.reshape(2, 12), (f(6, 4),), "(ab)c->a(bc)"),
    "reshape that does not nest": (lambda x: x.reshape(3, 2), (f(2, 3),), "a!b!->c!d!"),
    "reshape keeps what comes before a misfit": (
        lambda x: x.reshape(5, 3, 2),
        (f(5, 2, 3),),
        "ab!c!->ad!e!",
    ),
    "squeeze and expand": (lambda x: x[:, 0, None], (f(3, 1, 4),), "a1b->a1b"),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), (f(2, 4),), "ab->a(bc)"),
    "tile": (lambda x: jnp.tile(x, (1, 3)), (f(2, 4),), "ab->a(cb)"),
    "sum": (lambda x: x.sum(1), (f(3, 4),), "ab->a"),
    "mean and variance": (lambda x: (x.mean(0), x.var(0)), (f(3, 4),), "ab->b,b"),
    "softmax": (lambda x: jax.nn.softmax(x), (f(3, 4),), "ab->ab"),
    "argmax keeps the other dims": (lambda x: x.argmax(0), (f(1, 4),), "1a->a"),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), (f(3, 4),), "ab!->ab!"),
    "sort": (lambda x: jnp.sort(x, 1), (f(3, 4),), "ab!->ab!"),
    "sort pairs": (lambda x, y: lax.sort((x, y), 1), (f(3, 4), f(3, 4)), "ab!,ab!->ab!,ab!"),
    "top-k": (lambda x: lax.top_k(x, 2), (f(3, 4),), "ab!->ac!,ac!"),
    "max pool": (pool, (f(2, 6, 4),), "ab!c->ad!c"),
    "fourier": (lambda x: jnp.abs(jnp.fft.fft(x)), (f(3, 4),), "ab!->ac!"),
    "half of a dim": (lambda x: x[:, 4:], (f(3, 8),), "a(b!c)->ac"),
    "every second index": (lambda x: x[:, ::2], (f(3, 8),), "a(bc!)->ab"),
    "one index": (lambda x: x[:, 2], (f(3, 4),), "ab!->a"),
    "an irregular part": (lambda x: x[:, 1:], (f(3, 4),), "ab!->ac!"),
    "equal parts": (lambda x: tuple(jnp.split(x, 2, 1)), (f(3, 8),), "a(b!c)->ac,ac"),
    "rotated halves": (
        lambda x: x + jnp.concatenate([-x[:, 4:], x[:, :4]], 1),
        (f(3, 8),),
        "a(b!c!)->a(b!c!)",
    ),
    "join equal parts": (
        lambda x, y: jnp.concatenate([x, y], 1),
        (f(3, 4), f(3, 4)),
        "ab!,ab!->a(c!b!)",
    ),
    "join unequal parts": (
        lambda x, y: jnp.concatenate([x, y], 1),
        (f(3, 4), f(3, 1)),
        "ab!,a1->ac!",
    ),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (f(3, 4), f(3, 4)), "ab,ab->ac!b"),
    "reverse": (lambda x: x[:, ::-1], (f(3, 4),), "ab!->ab!"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 0))), (f(3, 4),), "ab!->ac!"),
    "dynamic slice": (
        lambda x, k: lax.dynamic_slice(x, (0, k), (3, 2)),
        (f(3, 4), np.int32(1)),
        "ab!,->ac!",
    ),
    "dynamic update": (
        lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)),
        (f(3, 4), f(3, 2)),
        "ab!,ac!->ab!",
    ),
    "lookup": (lambda t, k: t[k], (f(6, 4), i(6, 2, 3)), "ab,cd->cdb"),
    "lookup along a dim": (
        lambda x, k: jnp.take_along_axis(x, k[..., None], -1)[..., 0],
        (f(2, 3, 6), i(6, 2, 3)),
        "abc,ab->ab",
    ),
    "scatter": (
        lambda x, k, u: jnp.asarray(x).at[k].add(u),
        (f(6, 4), i(6, 3), f(3, 4)),
        "ab,c,cb->ab",
    ),
    "random bits": (
        lambda x: x + jax.random.uniform(jax.random.key(0), (3, 4)),
        (f(3, 4),),
        "ab->ab",
    ),
    "one-hot": (lambda k: jax.nn.one_hot(k, 5), (i(5, 3),), "a->ab"),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), (f(3, 4), f(4, 5)), "ab,bc->ac"),
    "custom derivative": (lambda x: jax.nn.relu(jax.nn.silu(x)), (f(3, 4),), "ab->ab"),
    "attention": (attend, (f(2, 3, 4, 5), f(2, 6, 4, 5), f(2, 6, 4, 5)), "abcd,aecd,aecf->abcf"),
    "grouped attention": (
        attend,
        (f(2, 3, 4, 5), f(2, 6, 2, 5), f(2, 6, 2, 5)),
        "ab(cd)e,afce,afcg->ab(cd)g",
    ),
}

MOVES_VALUES = {
    "lookup": "a",
    "lookup along a dim": "c",
    "scatter": "a",
    "random bits": "ab",
    "one-hot": "",
}
"""Classes whose indices are named by values, or met by random numbers: sharding them is fine, but
a permutation of the array alone changes the result."""


def analyse(function, args):
    program = jax.make_jaxpr(function)(*args)
    return program, find_dim_classes(
        program, [LeafLabel("param", str(n)) for n in range(len(args))]
    )


class Letters:
    """Names classes in the order they are met."""

    def __init__(self, classes):
        self.classes = classes
        self.names = {}

    def name(self, factor):
        return self.names.setdefault(factor.id, string.ascii_letters[len(self.names)])

    def dims(self, dims):
        return "".join(self._dim(dim) for dim in dims)

    def _dim(self, dim):
        text = "".join(self.name(factor) + "!" * self._blocked(factor) for factor in dim)
        return f"({text})" if len(dim) > 1 else text or "1"

    def _blocked(self, factor):
        return any(event.blocking for event in self.classes.events_of([factor.id]))


def permute(array, dims, name, order):
    """Reorder the indices of one class wherever it occurs in an array."""
    for axis, dim in enumerate(dims):
        before = np.array([factor.size for factor in dim], int)
        for position, factor in enumerate(dim):
            if factor.id == name:
                shape = (*array.shape[:axis], *before, *array.shape[axis + 1 :])
                array = np.take(array.reshape(shape), order, axis + position).reshape(array.shape)
    return array


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    function, args, expected = CASES[name]
    program, classes = analyse(function, args)
    letters = Letters(classes)
    inputs = [leaf.dims for leaf in classes.leaves]
    outputs = [classes.root.dims(variable) for variable in program.jaxpr.outvars]
    sides = [",".join(letters.dims(dims) for dims in side) for side in (inputs, outputs)]
    assert "->".join(sides) == expected

    plain = [np.asarray(out) for out in jax.tree.leaves(function(*args))]
    for factor in {factor for dims in inputs for dim in dims for factor in dim}:
        if letters._blocked(factor) or letters.name(factor) in MOVES_VALUES.get(name, ""):
            continue
        order = np.roll(np.arange(factor.size), 1)
        moved = [
            permute(np.asarray(a), d, factor.id, order) for a, d in zip(args, inputs, strict=True)
        ]
        results = jax.tree.leaves(function(*moved))
        for result, before, dims in zip(results, plain, outputs, strict=True):
            wanted = permute(before, dims, factor.id, order)
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_an_unknown_primitive_relates_nothing_and_keeps_its_operands_whole():
    primitive = jax.extend.core.Primitive("mystery")
    primitive.def_abstract_eval(lambda x: x)
    program, classes = analyse(lambda x: primitive.bind(x) * 2, (f(3, 4),))
    letters = Letters(classes)
    (out,) = program.jaxpr.outvars
    assert letters.dims(classes.leaves[0].dims) == "a!b!"
    assert letters.dims(classes.root.dims(out)) == "c!d!"


@pytest.mark.parametrize(("layout", "order"), [(0, "btnh"), (1, "bnth")])
def test_fused_attention_keeps_batch_and_heads_apart(layout, order):
    """The GPU's attention kernel appears under this name in a traced program."""
    primitive = jax.extend.core.Primitive("dot_product_attention_fwd_wrapper")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda q, k, v, bias, *, layout: [q])
    sizes = {"b": 2, "t": 3, "n": 4, "h": 5}
    query = f(*(sizes[letter] for letter in order))
    keys = {**sizes, "t": 6, "n": 2}
    key, value = (f(*(keys[letter] for letter in order)) for _ in range(2))
    program, classes = analyse(
        lambda *args: primitive.bind(*args, layout=layout), (query, key, value, f(0))
    )
    letters = Letters(classes)
    q, k, v = (letters.dims(leaf.dims) for leaf in classes.leaves[:3])
    out = letters.dims(classes.root.dims(program.jaxpr.outvars[0]))
    if order == "btnh":
        assert (q, k, v, out) == ("ab!(cd!)e!", "af!ce!", "af!cg!", "ab!(cd!)g!")
    else:
        assert (q, k, v, out) == ("a(bc!)d!e!", "abf!e!", "abf!g!", "a(bc!)d!g!")


UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv
erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt
square tan tanh
"""
BINARY = """
add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter polygamma pow rem sub zeta
"""
INTEGER = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_logical"


def test_elementwise_operations_do_not_fall_to_the_unknown_rule():
    real, whole = jnp.full((2, 3), 0.5), jnp.ones((2, 3), jnp.int32)
    calls = [(name, (real,)) for name in UNARY.split()]
    calls += [(name, (real, real)) for name in BINARY.split()]
    calls += [(name, (whole, whole)) for name in INTEGER.split()]
    for name, args in calls:
        _, classes = analyse(getattr(lax, name), args)
        assert not [event for event in classes.events if event.blocking], name


WITHOUT_A_RULE = """
after_all all_gather all_to_all call cholesky closed_call custom_jvp_call custom_lin
custom_linear_solve custom_vjp_call eig eigh eval_jaxpr get hessenberg householder_product jit lu
qr ragged_all_to_all remat2 schur select_and_scatter svd swap triangular_solve tridiagonal
tridiagonal_solve
"""
"""Calls, which are walked through, and operations that need their operands whole."""


def test_every_operation_that_a_release_of_jax_adds_is_looked_at():
    public = vars(jax.extend.core.primitives)
    named = {value.name for name, value in public.items() if name.endswith("_p")}
    assert not named - set(RULES) - set(CALL_RULES) - set(WITHOUT_A_RULE.split())


def test_the_derivative_of_tanh_keeps_dims_apart():
    """JAX 0.11 and later write it as an operation of its own."""
    _, classes = analyse(jax.grad(lambda x: jnp.tanh(x).sum()), (f(3, 4),))
    assert not [event for event in classes.events if event.blocking]
