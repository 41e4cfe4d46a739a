"""A model becomes flat leaves with canonical paths, and comes back the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import WIDTH, Norms, Odd, Residuals, builder, fill, numbers, pair

from meshwright.errors import UserError
from meshwright.program.trace.build_model import describe_model
from meshwright.program.trace.model_leaves import split_model

pytestmark = pytest.mark.quick


def paths(model_leaves, role):
    return [model_leaves.leaves[i].path for i in model_leaves.indices(role)]


@pytest.mark.parametrize("build", [Residuals, Odd, Norms, pair, builder("stacked_gpt")])
def test_splitting_and_merging_gives_the_model_back(build):
    model = fill(build)
    model_leaves = split_model(model)
    values = model_leaves.values(model)
    back = model_leaves.merge(values)
    assert nnx.graphdef(back) == nnx.graphdef(model)
    for ours, theirs in zip(model_leaves.values(back), values, strict=True):
        assert ours is theirs
    assert [leaf.shape for leaf in model_leaves.leaves] == [value.shape for value in values]
    assert [leaf.dtype for leaf in model_leaves.leaves] == [value.dtype for value in values]


def test_an_abstract_model_has_the_same_parts():
    concrete, abstract = split_model(fill(Norms)), split_model(nnx.eval_shape(Norms))
    assert concrete.leaves == abstract.leaves


def test_leaves_are_named_by_path_role_and_variable():
    model_leaves = split_model(nnx.eval_shape(Norms))
    assert paths(model_leaves, "param") == [
        "first.bias",
        "first.kernel",
        "last.bias",
        "last.kernel",
        "norm.bias",
        "norm.scale",
    ]
    assert paths(model_leaves, "state") == [
        "dropout.rngs.count",
        "dropout.rngs.key",
        *_statistics(),
    ]
    assert {leaf.variable for leaf in model_leaves.leaves} == {
        "Param",
        "BatchStat",
        "RngCount",
        "RngKey",
    }


def _statistics():
    return ["norm.mean", "norm.var"]


def test_bytes_count_every_element_once():
    (kernel,) = (x for x in split_model(fill(Norms)).leaves if x.path == "first.kernel")
    assert (kernel.size, kernel.nbytes) == (WIDTH * 32, WIDTH * 32 * 4)


def test_tied_weights_are_one_leaf():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
            self.again = self.embed
            self.table = self.embed.embedding

    model_leaves = split_model(nnx.eval_shape(Tied))
    assert [leaf.shape for leaf in model_leaves.leaves] == [(8, 4)]
    back = model_leaves.merge([jnp.ones((8, 4))])
    assert back.table is back.embed.embedding is back.again.embedding


def test_a_filter_says_what_is_trained():
    head = nnx.All(nnx.Param, nnx.PathContains("last"))
    model_leaves = split_model(nnx.eval_shape(Norms), head)
    assert paths(model_leaves, "param") == ["last.bias", "last.kernel"]
    frozen = {leaf.path for leaf in model_leaves.leaves if leaf.is_weight and leaf.role == "state"}
    assert frozen == {"first.bias", "first.kernel", "norm.bias", "norm.scale"}


def test_numbers_without_a_gradient_are_never_trained():
    class Counting(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))
            self.steps = nnx.Param(jnp.zeros((), jnp.int32))

    model_leaves = split_model(nnx.eval_shape(Counting))
    assert (paths(model_leaves, "param"), paths(model_leaves, "state")) == (["scale"], ["steps"])
    assert not model_leaves.leaves[1].is_weight


def test_complex_weights_are_trained():
    class Spectral(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros(3, jnp.complex64))

    assert paths(split_model(nnx.eval_shape(Spectral)), "param") == ["weight"]


def test_nothing_to_train_is_an_error_that_names_the_filter():
    with pytest.raises(
        UserError, match=r"no trainable parameters\nnone of its 2 leaves.*BatchStat"
    ):
        split_model(nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))), nnx.BatchStat)


def test_a_variable_may_hold_several_arrays():
    class Several(nnx.Module):
        def __init__(self):
            self.both = nnx.Param({"a": jnp.ones(2), "b": jnp.zeros(3)})

    model_leaves = split_model(nnx.eval_shape(Several))
    assert [(leaf.path, leaf.shape) for leaf in model_leaves.leaves] == [
        ("both.0", (2,)),
        ("both.1", (3,)),
    ]
    back = model_leaves.merge([jnp.full(2, 5.0), jnp.full(3, 6.0)])
    assert back.both["b"].tolist() == [6.0] * 3


# Flax deprecates sowing outside of nnx.capture, but models that do it must still train.
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_are_not_leaves_even_if_the_model_already_holds_some():
    class Sowing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", y)
            return y

    model = fill(Sowing)
    model(numbers(2, WIDTH))
    model_leaves = split_model(model)
    assert [leaf.path for leaf in model_leaves.leaves] == ["linear.bias", "linear.kernel"]
    values = model_leaves.values(model)
    back = model_leaves.merge(values)
    expected = numbers(2, WIDTH) @ np.asarray(values[1]) + np.asarray(values[0])
    np.testing.assert_allclose(back(numbers(2, WIDTH)), expected, rtol=1e-5)
    back(numbers(2, WIDTH))
    assert all(a is b for a, b in zip(model_leaves.values(back), values, strict=True))


def test_a_model_that_loses_a_variable_is_an_error_that_names_it():
    model = fill(Norms)
    model_leaves = split_model(model)
    del model.norm.mean
    with pytest.raises(UserError, match=r"`norm\.mean` was deleted"):
        model_leaves.values(model)


def test_merging_works_inside_a_gradient():
    model = fill(Residuals)
    model_leaves = split_model(model)
    values = model_leaves.values(model)

    def loss(values):
        return jnp.sum(model_leaves.merge(values)(numbers(2, WIDTH)) ** 2)

    gradients = jax.jit(jax.grad(loss))(values)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in model_leaves.leaves]


ANNOTATIONS = {
    "initializer": lambda init: {"kernel_init": nnx.with_partitioning(init, ("fsdp", "tensor"))},
    "metadata": lambda init: {"kernel_metadata": {"out_sharding": ("fsdp", "tensor")}},
    "old metadata": lambda init: {"kernel_metadata": {"sharding_names": ("fsdp", "tensor")}},
    "logical": lambda init: {
        "kernel_init": nnx.with_partitioning(
            init, ("embed", "mlp"), sharding_rules=(("embed", "fsdp"), ("mlp", "tensor"))
        )
    },
}


# Flax has renamed sharding_names to out_sharding, but models that write it must still train.
@pytest.mark.filterwarnings("ignore:'sharding_names' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("spelling", sorted(ANNOTATIONS))
def test_the_authors_axis_names_are_kept(spelling):
    arguments = ANNOTATIONS[spelling](nnx.initializers.zeros)
    linear = lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0), **arguments)  # noqa: E731
    model_leaves = describe_model(lambda _: linear())
    assert {leaf.path: leaf.annotation for leaf in model_leaves.leaves} == {
        "bias": None,
        "kernel": ("fsdp", "tensor"),
    }


def test_an_attribute_that_was_a_module_and_is_a_function_is_named():
    class Replaced(nnx.Module):
        def __init__(self, other):
            self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.head = other

    with pytest.raises(UserError) as caught:
        split_model(Replaced(nnx.identity))
    assert "`head` of the model" in caught.value.what
    split_model({"a": Replaced(nnx.static(nnx.identity)), "b": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
