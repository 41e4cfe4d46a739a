"""Loops, branches and calls are entered, with new dims at every call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.program.dims.classes import LeafLabel, find_dim_classes
from meshwright.program.jaxpr.names import MODULE_MARK

pytestmark = pytest.mark.quick


def analyse(function, *shapes, roles=None):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.make_jaxpr(function)(*args)
    roles = roles or ["param"] * len(args)
    labels = [LeafLabel(role, str(n)) for n, role in enumerate(roles)]
    return program, find_dim_classes(program, labels)


def ids(dims):
    return [tuple(factor.id for factor in dim) for dim in dims]


def outputs(program, classes):
    return [ids(classes.root.dims(variable)) for variable in program.jaxpr.outvars]


def inputs(classes):
    return [ids(leaf.dims) for leaf in classes.leaves]


def programs(program, primitive):
    """All programs entered by equations of a primitive, at any depth."""
    found = []
    for number, inner in program.calls.items():
        if program.jaxpr.eqns[number].primitive.name == primitive:
            found += inner
        for child in inner:
            found += programs(child, primitive)
    return found


def test_one_jaxpr_called_twice_does_not_tie_its_callers_together():
    square = jax.jit(lambda x: jnp.sin(x) * x)
    program, classes = analyse(lambda x, y: (square(x), square(y)), (3, 4), (3, 4))
    x, y = inputs(classes)
    assert outputs(program, classes) == [x, y]
    assert not set(x) & set(y)


def test_a_nested_variable_has_the_dims_of_its_own_call():
    program, classes = analyse(
        lambda x, y: (jax.jit(jnp.sin)(x), jax.jit(jnp.sin)(y)), (3, 4), (3, 4)
    )
    assert len(program.jaxpr.eqns) == 2
    for number, wanted in enumerate(inputs(classes)):
        (called,) = classes.root.calls[number]
        (equation,) = called.jaxpr.eqns
        assert ids(called.dims(equation.outvars[0])) == wanted


def test_scan_ties_carries_to_themselves_and_slices_to_the_stack():
    def loop(x, kernels):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(0)), x, kernels)

    program, classes = analyse(loop, (2, 4), (3, 4, 4))
    (batch, hidden), (layers, rows, columns) = inputs(classes)
    assert rows == columns == hidden
    assert outputs(program, classes) == [[batch, hidden], [layers, hidden]]
    assert {event.kind for event in classes.events_of(layers)} == {"block"}


def test_what_happens_in_a_loop_counts_as_often_as_the_loop_runs():
    def nested(x, kernels):
        def outer(h, w):
            return lax.scan(lambda g, _: (g @ w, None), h, None, length=5)[0], None

        return lax.scan(outer, x, kernels)[0]

    _, classes = analyse(nested, (2, 4), (3, 4, 4))
    (event,) = [event for event in classes.events if event.kind == "contract"]
    assert event.times == 15
    assert event.total == 15 * 2 * 4 * 4


def test_while_ties_carries_to_themselves():
    def loop(x, w):
        return lax.while_loop(lambda h: h.sum() < 9, lambda h: h * w, x)

    program, classes = analyse(loop, (3, 4), (3, 4))
    x, w = inputs(classes)
    assert x == w == outputs(program, classes)[0]
    condition, body = programs(classes.root, "while")
    assert ids(condition.dims(condition.jaxpr.invars[0])) == x
    assert ids(body.dims(body.jaxpr.outvars[0])) == x


def test_cond_merges_the_results_of_its_branches():
    def choose(x, w, v):
        return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ v, x)

    program, classes = analyse(choose, (2, 3), (3, 4), (3, 4))
    x, w, v = inputs(classes)
    assert w == v == [x[1], w[1]]
    assert outputs(program, classes) == [[x[0], w[1]]]
    assert len(programs(classes.root, "cond")) == 2


@jax.custom_vjp
def doubled(x, w):
    return (x @ w) * 2


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        lambda f: lambda x, w: doubled(x, w),
    ],
    ids=["plain", "jit", "checkpoint", "nested", "custom_vjp"],
)
def test_calls_are_transparent(wrap):
    program, classes = analyse(wrap(lambda x, w: jnp.sin(x @ w)), (2, 3), (3, 4))
    (batch, inner), (rows, columns) = inputs(classes)
    assert rows == inner
    assert outputs(program, classes) == [[batch, columns]]
    assert [event.nbytes for event in classes.events if event.kind == "contract"] == [2 * 4 * 4]


def test_shard_map_takes_the_divided_dim_apart():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec = PartitionSpec("data")

    def inside(x, w):
        return x @ w

    function = jax.shard_map(inside, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    program, classes = analyse(function, (8, 3), (3, 5))
    (batch, inner), (rows, columns) = inputs(classes)
    assert rows == inner
    assert [factor.size for factor in classes.leaves[0].dims[0]] == [4, 2]
    (called,) = programs(classes.root, "shard_map")
    assert ids(called.dims(called.jaxpr.outvars[0])) == [batch[1:], columns]
    (out,) = outputs(program, classes)
    assert out[0][1:] == batch[1:]
    assert out[1] == columns
    assert any(event.kind == "block" for event in classes.events_of(batch[:1]))


def test_modules_of_nested_equations_fall_back_to_the_callers():
    def loss(x, w):
        with jax.named_scope(MODULE_MARK + "blocks.3.mlp"):
            x = jax.jit(lambda x: x @ w)(x)
            with jax.named_scope(MODULE_MARK + "blocks.3.mlp.down"):
                x = x @ w
        return x.sum()

    _, classes = analyse(loss, (2, 4), (4, 4))
    contracted = [event.path for event in classes.events if event.kind == "contract"]
    assert contracted == ["blocks.3.mlp", "blocks.3.mlp.down"]
    assert classes.events[-1].path == ""
