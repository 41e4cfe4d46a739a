"""What the classes of a program say about batch, roles and communication."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.program.dims.classes import LeafLabel, Roles, find_dim_classes
from meshwright.program.jaxpr.names import MODULE_MARK

pytestmark = pytest.mark.quick

SAMPLES, INPUTS, HIDDEN, OUTPUTS = 6, 5, 7, 3
FLOAT = 4


def analyse(function, **leaves):
    """Trace a function of leaves named role_path."""
    labels = [LeafLabel(*name.split("_", 1)) for name in leaves]
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if "token" in name else jnp.float32)
        for name, shape in leaves.items()
    ]
    return find_dim_classes(jax.make_jaxpr(function)(*structs), labels)


def class_of(classes, path, dim, position=0):
    return classes.leaf(path).dims[dim][position].id


def mlp_loss(up, bias, down, scale, x):
    with jax.named_scope(MODULE_MARK + "up"):
        hidden = jnp.tanh(x @ up + bias)
    with jax.named_scope(MODULE_MARK + "down"):
        return ((hidden @ down) * scale).sum() / SAMPLES


def mlp():
    return analyse(
        mlp_loss,
        param_up=(INPUTS, HIDDEN),
        param_bias=(HIDDEN,),
        param_down=(HIDDEN, OUTPUTS),
        state_scale=(),
        batch_x=(SAMPLES, INPUTS),
    )


def test_dims_that_meet_are_one_class():
    classes = mlp()
    hidden = class_of(classes, "up", 1)
    assert hidden == class_of(classes, "bias", 0) == class_of(classes, "down", 0)
    assert class_of(classes, "up", 0) == class_of(classes, "x", 1) != hidden
    assert classes.leaf("scale").dims == ()


def test_the_batch_is_the_class_of_the_first_dim_of_the_data():
    classes = mlp()
    assert classes.batch == {class_of(classes, "x", 0)}
    first = classes.root.jaxpr.eqns[0].outvars[0]
    assert classes.root.dims(first)[0][0].id in classes.batch


def test_sharding_a_hidden_dim_costs_one_reduction_forward():
    """The data has no gradient, so dividing the columns of the first kernel is free backward."""
    classes = mlp()
    hidden = class_of(classes, "up", 1)
    (event,) = classes.events_of([hidden])
    assert (event.kind, event.primitive, event.path) == ("contract", "dot_general", "down")
    assert event.total == SAMPLES * OUTPUTS * FLOAT
    assert classes.traffic([hidden]) == 2 * SAMPLES * OUTPUTS * FLOAT


def test_sharding_columns_costs_a_reduction_backward_where_the_input_has_a_gradient():
    classes = mlp()
    outputs = class_of(classes, "down", 1)
    spread = [event for event in classes.events_of([outputs]) if event.kind == "spread"]
    assert [(event.nbytes, event.path) for event in spread] == [(SAMPLES * HIDDEN * FLOAT, "down")]


def test_sharding_the_batch_reduces_every_gradient_once():
    classes = mlp()
    spread = [event for event in classes.events_of(classes.batch) if event.kind == "spread"]
    weights = sum(leaf.nbytes for leaf in classes.weights)
    assert sum(event.total for event in spread) == weights
    # The scalar loss is the only other thing that is reduced.
    assert classes.traffic(classes.batch) == 2 * (weights + FLOAT)


def test_partial_gradients_of_one_array_travel_once():
    def loss(embed, q, k, v, x):
        h = (x @ embed).astype(jnp.bfloat16).astype(jnp.float32)
        return ((h @ q) * (h @ k) * (h @ v)).sum()

    square = (INPUTS, HIDDEN)
    classes = analyse(
        loss,
        param_embed=(INPUTS, INPUTS),
        param_q=square,
        param_k=square,
        param_v=square,
        batch_x=(SAMPLES, INPUTS),
    )
    hidden = class_of(classes, "q", 1)
    assert hidden == class_of(classes, "k", 1) == class_of(classes, "v", 1)
    kinds = [event.kind for event in classes.events_of([hidden])]
    assert kinds == ["spread"] * 3 + ["reduce"]
    assert classes.traffic([hidden]) == 2 * (SAMPLES * INPUTS * FLOAT + FLOAT)


def test_roles_say_what_column_and_row_mean():
    def loss(table, heads, out, tokens):
        h = table[tokens]
        h = jnp.einsum("btd,dnh->btnh", h, heads)
        h = jnp.einsum("btnh,nhd->btd", h, out)
        return (h @ table.T).sum()

    classes = analyse(
        loss,
        param_table=(11, 8),
        param_heads=(8, 2, 3),
        param_out=(2, 3, 8),
        batch_tokens=(4, 5),
    )
    assert classes.roles_of("heads") == Roles(column=(1, 2), row=(0,))
    assert classes.roles_of("out") == Roles(column=(2,), row=(0, 1))
    # A tied table is a lookup first, but column and row speak of its matrix product.
    assert classes.roles_of("table") == Roles(column=(0,), row=(1,))
    assert classes.vocabularies == {class_of(classes, "table", 0)}


def test_a_table_that_is_only_looked_up_has_its_entries_as_columns():
    classes = analyse(
        lambda table, tokens: table[tokens].sum(), param_table=(11, 8), batch_tokens=(4, 5)
    )
    assert classes.roles_of("table") == Roles(column=(1,), row=(0,))


def test_what_is_only_added_is_no_kernel():
    def loss(kernel, bias, positions, x):
        return ((x + positions) @ kernel + bias).sum()

    classes = analyse(
        loss,
        param_kernel=(INPUTS, HIDDEN),
        param_bias=(HIDDEN,),
        param_positions=(1, INPUTS),
        batch_x=(SAMPLES, INPUTS),
    )
    assert [leaf.path for leaf in classes.weights if leaf.is_kernel] == ["kernel"]


def test_heads_run_side_by_side_and_their_dims_are_contracted():
    def loss(q, k, v, x):
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in (q, k, v))
        return jax.nn.dot_product_attention(query, key, value).sum()

    kernel = (8, 4, 2)
    classes = analyse(loss, param_q=kernel, param_k=kernel, param_v=kernel, batch_x=(3, 5, 8))
    assert classes.heads == {class_of(classes, "q", 1)}
    inside = {class_of(classes, "q", 2), class_of(classes, "x", 1)}
    assert classes.inside_heads == inside


def test_class_ids_are_the_same_for_the_same_program():
    assert mlp().leaves == mlp().leaves
    once, again = ([(e.kind, e.classes, e.kept) for e in mlp().events] for _ in range(2))
    assert once == again
