"""Every way to hand over a model gives the same model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.errors import UserError
from meshwright.inputs.user_model import call_with_rngs, model_source

pytestmark = pytest.mark.quick

BATCH = {"x": jax.ShapeDtypeStruct((8, 3), jnp.float32)}


class Net(nnx.Module):
    def __init__(self, width: int = 5, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, width, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class LinenNet(nn.Module):
    width: int = 5

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def positional(rngs):
    return Net(rngs=rngs)


def keyword(*, rngs):
    return Net(rngs=rngs)


def unnamed(r):
    return Net(rngs=r)


def with_default(width: int = 5):
    return Net(width, rngs=nnx.Rngs(0))


def loss(model, batch):
    return model(batch["x"]).mean()


def linen_loss(model, batch):
    return model(batch["x"], train=True, mutable=["batch_stats"]).mean()


def source(model, its_loss=loss):
    return model_source(model, its_loss, lambda: BATCH)


def kernel(model) -> np.ndarray:
    return np.asarray(model.layer.kernel[...])


@pytest.mark.parametrize(
    "builder",
    [
        Net,
        functools.partial(Net, 5),
        positional,
        keyword,
        unnamed,
        with_default,
        lambda: Net(rngs=nnx.Rngs(0)),
        Net(rngs=nnx.Rngs(0)),
    ],
)
def test_builders_with_and_without_rngs_and_models_that_exist(builder):
    np.testing.assert_array_equal(
        kernel(source(builder)(nnx.Rngs(0))), kernel(Net(rngs=nnx.Rngs(0)))
    )


def test_arguments_are_passed_on():
    assert call_with_rngs(Net, {"width": 7})(nnx.Rngs(0)).layer.out_features == 7
    assert call_with_rngs(with_default, {"width": 7})(nnx.Rngs(0)).layer.out_features == 7


@pytest.mark.parametrize(
    "builder", [LinenNet(), LinenNet, lambda: LinenNet(width=5), lambda rngs: LinenNet()]
)
def test_a_linen_module_gets_the_parameters_flaxs_bridge_gives_it(builder):
    found = source(builder, linen_loss)(nnx.Rngs(0))
    expected = nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0))
    expected.lazy_init(jnp.zeros((1, 3)), train=True)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(found))}
    assert {"Dense_0.kernel", "BatchNorm_0.mean"} <= paths
    np.testing.assert_array_equal(found.Dense_0["kernel"][...], expected.Dense_0["kernel"][...])


def test_a_linen_module_is_built_without_computing_anything():
    shapes = nnx.eval_shape(lambda: source(LinenNet(), linen_loss)(nnx.Rngs(0)))
    assert shapes.Dense_0["kernel"].shape == (3, 5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (5, "the model is 5, of type int"),
        ("gpt", "lambda rngs: Net"),
        (lambda a, b: None, "it requires a, b"),
        (lambda *, key: None, "it requires key"),
        (lambda rngs: None, "the model's builder returned None"),
        (lambda rngs: Net, "of type"),
        ({"encoder": LinenNet()}, "`encoder` of the model is a Linen module"),
    ],
)
def test_what_is_no_model_says_what_to_write(model, message):
    with pytest.raises(UserError) as caught:
        source(model)(nnx.Rngs(0))
    assert message in str(caught.value)
