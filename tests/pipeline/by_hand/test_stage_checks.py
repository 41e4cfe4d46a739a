"""What a pipeline cannot do with its arguments is said before anything is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from small_models import fill

from meshwright.errors import UserError
from meshwright.pipeline.by_hand.staged_pipeline import Pipeline
from meshwright.pipeline.schedule.schedules import get_schedule

X = np.ones((16, 8), np.float32)


def squared(output, target):
    return ((output - target) ** 2).mean()


def linear(width_in=8, width_out=8):
    return fill(lambda: nnx.Linear(width_in, width_out, rngs=nnx.Rngs(0)))


def build(layers=None, **arguments):
    given = {"loss": squared, "example": X, "num_microbatches": 4, **arguments}
    return Pipeline(layers or [linear() for _ in range(4)], **given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0 is not valid"),
        ({"num_microbatches": -1}, "num_microbatches=-1 is not valid"),
        ({"num_stages": 0}, "num_stages=0 is not valid"),
        ({"num_stages": 2.0}, "it is of type float"),
        ({"balance_by": "time"}, 'write balance_by="flops"'),
        ({"num_chunks": 2}, "num_chunks=2 does not go with schedule='1f1b'"),
        ({"num_chunks": 3, "schedule": get_schedule("interleaved")}, "num_chunks=3 does not"),
        ({"num_chunks": 0, "schedule": "interleaved"}, "num_chunks=0 is not valid"),
        ({"schedule": None}, "schedule=None is not valid"),
        (
            {"schedule": "interleaved", "num_stages": 4},
            "4 layers cannot be divided into 4 stages × 2 chunks(.|\n)*num_stages=2",
        ),
        (
            {"schedule": "interleaved", "num_stages": 2, "num_microbatches": 3},
            'num_microbatches=2 or 4, or schedule="1f1b"',
        ),
        ({"num_stages": 5}, "4 layers cannot be divided into 5 stages"),
        ({"num_stages": 3, "devices": jax.devices()[:2]}, "write num_stages=2"),
        ({"devices": []}, r"devices=\[\] is not a list of devices"),
        ({"devices": 8}, "devices=8 is not a list of devices"),
        ({"devices": "cpu"}, "it is of type str"),
        ({"devices": [0, 1]}, r"devices=\[0, 1\] is not a list of devices"),
        ({"devices": jax.devices()[:1] * 2}, r"devices\[1\] is .*listed already"),
        ({"seed": "a"}, "seed='a' is not valid"),
        ({"seed": 1.5}, "it is of type float"),
        ({"loss": None}, r"loss=None is not valid(.|\n)*write a function loss\(output, target\)"),
        ({"example": [1, 2]}, "example has a leaf that is not an array of samples"),
        ({"example": np.ones((0, 8))}, "example has no samples"),
        ({"example": ()}, "example has no arrays"),
    ],
)
def test_arguments_that_do_not_work_are_refused(arguments, said):
    with pytest.raises(UserError, match=said) as caught:
        build(**arguments)
    assert caught.value.fix


def test_batches_that_do_not_fit_are_refused():
    pipeline = build([linear(), linear(8, 4)], devices=jax.devices()[:2])
    y = np.zeros((16, 4), np.float32)
    for x, target, said in [
        (X, y[:12], "x has 16 samples, target 12"),
        (X[:3], y[:3], "num_microbatches=3"),
        (X[:, :7], y, r"layer 0 \(Linear\) fails(.|\n)*float32\[4, 7\](.|\n)*kernel \[8, 8\]"),
        (X, y[:, :3], r"output is float32\[4, 4\], the target float32\[4, 3\]"),
        (X, None, "target has no arrays"),
        ((X, X[:8]), y, "x have different numbers of samples"),
        ({"x": X}, y, r"its input is x: float32\[4, 8\]"),
    ]:
        with pytest.raises(UserError, match=said):
            pipeline.loss_and_gradients(x, target)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, target: (output - target) ** 2, r"returns float32\[4, 8\]"),
        (lambda output, target: (output.mean(), {}), "returns a tuple"),
        (lambda output, target: jnp.argmax(output), "the loss is not a float"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, said):
    with pytest.raises(UserError, match=said):
        build([linear()], loss=loss).loss_and_gradients(X, X)


def test_states_that_were_used_before_are_refused():
    # Two devices a stage: deleted buffers on several devices would end the interpreter.
    pipeline = build([linear(), linear()], num_stages=2, devices=jax.devices()[:4])
    optimizer = optax.adam(0.1)
    states = pipeline.init(optimizer)
    before = jax.device_get(pipeline.update(optimizer, states, X, X)[1])
    with pytest.raises(UserError, match=r"loss, states = pipeline\.update"):
        pipeline.update(optimizer, states, X, X)
    pipeline.update(optimizer, before, X, X)


def test_an_output_without_samples_is_refused():
    pipeline = build([linear(), lambda x: {"all": x.mean(0), "each": x}], num_stages=1)
    with pytest.raises(UserError, match=r"output \['all'\] has no samples(.|\n)*float32\[8\]"):
        pipeline(X)


def test_parameters_that_are_no_floats_are_refused():
    def scaled(params, x):
        return params["w"] * x ** params["k"]

    with pytest.raises(UserError, match=r"params\['k'\] of scaled is of type int32"):
        build([(scaled, {"w": np.ones(8, np.float32), "k": np.int32(2)}), linear()])


def test_parameters_and_optimizers_of_another_kind_are_refused():
    pipeline = build([linear(), linear(8, 4)], devices=jax.devices()[:2])
    for values, said in [
        (pipeline.params[:1], "params has 1 elements for 2 stages"),
        (pipeline.params[::-1], r"params\[0\] has an array of shape \[4\] for one of \[8\]"),
        ([(), ()], r"params\[0\] has another structure"),
        ({}, "params is of type dict"),
    ]:
        with pytest.raises(UserError, match=said):
            pipeline.params = values
    with pytest.raises(UserError, match=r"the optimizer is 0\.1, of type float"):
        pipeline.init(0.1)
    with pytest.raises(UserError, match="clip_norm='1' is not valid"):
        pipeline.update(optax.sgd(0.1), [(), ()], X, X[:, :4], clip_norm="1")
    with pytest.raises(UserError, match="clip_norm=0 would stop all learning"):
        pipeline.update(optax.sgd(0.1), [(), ()], X, X[:, :4], clip_norm=0)
    with pytest.raises(UserError, match="states has 0 elements"):
        pipeline.update(optax.sgd(0.1), [], X, X[:, :4])


def test_a_linen_module_that_draws_random_numbers_is_told_what_to_do():
    with pytest.raises(UserError, match=r"layer 1 \(Dropout\) draws random numbers") as caught:
        build([linear(), linen.Dropout(0.5, deterministic=False), linear()])
    assert "no random stream: InvalidRngError" in caught.value.why
    assert "deterministic=True" in caught.value.fix
    assert build([linear(), linen.Dropout(0.5, deterministic=True), linear()]).num_stages == 3


def test_a_pipeline_inside_of_a_transformation_is_refused_and_works_outside():
    pipeline = build([linear(), linear(8, 4)], devices=jax.devices()[:2])
    optimizer, y = optax.sgd(0.1, momentum=0.9), X[:, :4]
    states = pipeline.init(optimizer)

    def assign(params):
        pipeline.params = params

    for inside, said in [
        (lambda: jax.jit(pipeline)(X), "x is traced"),
        (lambda: jax.jit(lambda a: pipeline(X) * a)(1.0), "be part of another program$"),
        (lambda: jax.grad(lambda x: pipeline(x).sum())(X), "x is traced"),
        (lambda: jax.vmap(pipeline)(X[None]), "x is traced"),
        (lambda: jax.jit(pipeline.loss_and_gradients)(X, y), "x and target are traced"),
        (lambda: jax.jit(lambda s: pipeline.update(optimizer, s, X, y))(states), "states is"),
        (lambda: jax.jit(assign)(pipeline.params), "params is traced"),
    ]:
        with pytest.raises(UserError, match=r"cannot run inside jax\.jit") as caught:
            inside()
        assert re.search(said, caught.value.why)
    assert np.isfinite(pipeline.update(optimizer, states, X, y)[0])
