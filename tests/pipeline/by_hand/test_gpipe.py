"""What the simplest pipeline cannot run is said in its own words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from program.programs import assert_close
from small_models import fill

from meshwright.errors import UserError
from meshwright.pipeline import Pipeline
from meshwright.pipeline.by_hand.gpipe import GPipePipeline, PipelineStage, pipeline_forward

SPEC = {"in_features": 8, "out_features": 4}


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([{}], "layer 0 of stage 1 lacks in_features and out_features"),
        ([SPEC, {"in_features": 4, "out_feature": 4}], "did you mean `out_features`"),
        ([{**SPEC, "activation": "gelu"}], "has the unknown key activation"),
        ([{**SPEC, "in_features": "8"}], "in_features='8' is not valid"),
        ([SPEC, SPEC], "write in_features=4"),
        ([(8, 4)], "layer 0 of stage 1 is of type tuple"),
        (SPEC, "layer_specs is one mapping"),
        ([], "layer_specs is empty"),
    ],
)
def test_layers_that_cannot_be_built_are_refused(specs, said):
    with pytest.raises(UserError, match=said):
        PipelineStage(specs, 1, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def stage():
    return fill(lambda: PipelineStage([SPEC], 0, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("count", "inputs", "microbatches", "said"),
    [
        (0, jnp.ones((4, 8)), 2, "stages is empty"),
        (2, jnp.ones((4, 8)), 2, r"stage 1 fails(.|\n)*float32\[2, 4\]"),
        (1, jnp.ones((4, 8)), 0, "num_microbatches=0 is not valid"),
        (1, jnp.ones(()), 1, "not an array of samples"),
    ],
)
def test_a_forward_pass_that_cannot_be_is_refused(stage, count, inputs, microbatches, said):
    with pytest.raises(UserError, match=said):
        pipeline_forward([stage] * count, inputs, microbatches)


def test_one_stage_is_no_list_and_numbers_are_those_of_stages(stage):
    with pytest.raises(UserError, match="one module or function"):
        pipeline_forward(stage, jnp.ones((4, 8)), 2)
    model = fill(lambda: GPipePipeline(2, 1, 8, rngs=nnx.Rngs(0)))
    for number in (-1, 2):
        with pytest.raises(UserError, match=f"there is no stage {number}"):
            model.forward_stage(number, jnp.ones((4, 8)))
    with pytest.raises(UserError, match="num_stages=0"):
        GPipePipeline(0, 1, 8, rngs=nnx.Rngs(0))


class Stage(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        # Not random: compiling a random initializer takes seconds.
        kernel_init = linen.initializers.constant(0.1)
        return jnp.tanh(linen.Dense(self.features, kernel_init=kernel_init)(x))


def linen_stages(x, widths=(12, 6, 3)):
    """Return modules, their variables, and what they give one after another."""
    modules, variables = [Stage(width) for width in widths], []
    random = np.random.default_rng(0)
    for module in modules:
        shapes = jax.eval_shape(module.init, jax.random.key(0), x)
        variables.append(
            jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype("float32"), shapes)
        )
        x = module.apply(variables[-1], x)
    return modules, variables, x


def test_linen_modules_are_stages():
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    modules, variables, expected = linen_stages(x)
    bound = [module.bind(own) for module, own in zip(modules, variables, strict=True)]
    assert_close({"out": pipeline_forward(bound, x, 4)}, {"out": expected}, 1e-5)

    bridged, value = [], x
    for module in modules:
        bridged.append(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(value))
        value = bridged[-1](value)
    assert_close({"out": pipeline_forward(bridged, x, 4)}, {"out": value}, 1e-5)


def test_a_linen_module_without_parameters_is_told_where_they_come_from():
    with pytest.raises(UserError, match=r"stage 1 \(Stage\) is a Linen module without") as caught:
        pipeline_forward([jnp.tanh, Stage(3)], jnp.ones((4, 3)), 2)
    assert "nnx.bridge.ToNNX(Stage(…), rngs=rngs).lazy_init(x)" in caught.value.fix


@pytest.mark.full
def test_a_pipeline_of_linen_modules_equals_running_them_in_sequence():
    x = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    target = np.ones((8, 3), np.float32)
    modules, variables, expected = linen_stages(x)

    def loss(output, target):
        return ((output - target) ** 2).mean()

    bound = [module.bind(own) for module, own in zip(modules, variables, strict=True)]
    pipeline = Pipeline(bound, loss=loss, example=x, num_stages=3, num_microbatches=4)
    assert_close({"out": pipeline(x)}, {"out": expected}, 1e-5)

    def whole(params):
        value = x
        for module, own in zip(modules, params, strict=True):
            value = module.apply(own, value)
        return loss(value, target)

    value, gradients = pipeline.loss_and_gradients(x, target)
    plain, expected_gradients = jax.value_and_grad(whole)(variables)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    unbound = Pipeline([Stage(4), Stage(3)], loss=loss, example=x, num_stages=2)
    value = x
    for module in unbound.modules():
        value = module(value)
    np.testing.assert_allclose(unbound(x), value, rtol=1e-5)


def test_a_relu_before_the_loss_is_warned_of(stage):
    with pytest.warns(UserWarning, match="write relu=False in the spec of the last layer"):
        Pipeline([stage], loss=lambda y, t: ((y - t) ** 2).mean(), example=jnp.ones((4, 8)))
