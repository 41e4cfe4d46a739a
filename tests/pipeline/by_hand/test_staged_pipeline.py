"""Stages that differ, each on its own devices, equal the model on one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from program.programs import quick
from quick import quick_compilation
from small_models import double, fill

import meshwright as mw
from meshwright.errors import UserError
from meshwright.pipeline.by_hand.gpipe import GPipePipeline, PipelineStage, pipeline_forward
from meshwright.pipeline.by_hand.staged_pipeline import Pipeline

WIDTHS = (24, 16, 16, 8, 5)
SPECS = [
    [{"in_features": a, "out_features": b, "relu": b != WIDTHS[-1]}]
    for a, b in itertools.pairwise(WIDTHS)
]


__all__ = ["quick_compilation"]
pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore:the output of the last layer passes a ReLU"),
]


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def stage(number):
    return PipelineStage(SPECS[number], number, rngs=nnx.Rngs(0))


def mlp_stages():
    return [double(fill(functools.partial(stage, n), seed=n)) for n in range(len(SPECS))]


def inputs(samples=18, width=WIDTHS[0]):
    return np.random.default_rng(0).normal(size=(samples, width))


def labels(samples=18):
    return np.random.default_rng(1).integers(WIDTHS[-1], size=samples)


def cross_entropy(logits, label):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1)
    return -picked.mean()


def one_device(stages, x, y):
    """Return loss and gradients of the stages one after another, by Flax alone."""
    graphdef, params, rest = nnx.split(nnx.List(stages), nnx.Param, ...)

    def loss(params):
        out = jnp.asarray(x)
        for stage in nnx.merge(graphdef, params, rest):
            out = stage(out)
        return cross_entropy(out, y)

    return quick(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(s, marks=pytest.mark.full) for s in ("gpipe", "1f1b")), "zb_h1"]
)
def test_four_different_stages_give_the_gradients_of_one_device(schedule):
    x, y = inputs(), labels()
    expected, gradients = one_device(mlp_stages(), x, y)
    pipeline = Pipeline(
        mlp_stages(),
        loss=cross_entropy,
        example=x,
        schedule=schedule,
        num_microbatches=6,
        devices=jax.devices()[:4],
    )
    loss, found = pipeline.loss_and_gradients(x, y)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-15)
    assert [s.devices for s in pipeline.stages] == [(0,), (1,), (2,), (3,)]
    assert [s.parameters for s in pipeline.stages] == [400, 272, 136, 45]
    assert max(pipeline.most_kept) == (6 if schedule == "gpipe" else 4)


@pytest.mark.full
def test_layers_of_every_kind_in_interleaved_chunks_on_pairs_of_devices():
    scale = jnp.full((16,), 0.5)
    layers = [
        double(fill(lambda: nnx.Linear(24, 16, rngs=nnx.Rngs(0)))),
        jnp.tanh,
        linen.Dense(16, param_dtype=jnp.float64),
        (lambda p, x: x * p, scale),
        double(fill(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))),
        double(nnx.Linear(8, 5, rngs=nnx.Rngs(2))),
    ]
    x, y = inputs(16), labels(16)
    pipeline = Pipeline(
        layers,
        loss=cross_entropy,
        example=x,
        num_stages=2,
        schedule="interleaved",
        num_microbatches=4,
        devices=jax.devices()[:4],
    )

    def loss(params):
        out = jnp.asarray(x)
        for part, own in zip(pipeline._parts, params, strict=True):
            out, _ = part.apply(own, part.state, out)
        return cross_entropy(out, y)

    params = [jax.device_get(p) for p in pipeline.params]
    expected, gradients = quick(jax.value_and_grad(loss))(params)
    value, found = pipeline.loss_and_gradients(x, y)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12)
    assert [s.devices for s in pipeline.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_samples_that_do_not_divide_count_as_much_as_the_others():
    stages, x, y = mlp_stages()[:2], inputs(7), labels(7)
    expected, _ = one_device(stages, x, y)
    pipeline = Pipeline(
        stages, loss=cross_entropy, example=x, num_microbatches=3, devices=jax.devices()[:2]
    )
    loss, _ = pipeline.loss_and_gradients(x, y)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    outputs = pipeline(x)
    assert outputs.shape == (7, WIDTHS[2])


def test_the_documented_pipeline_gives_distinct_microbatches_their_own_results():
    stages, x = mlp_stages(), jnp.asarray(inputs())
    expected = quick(lambda x: functools.reduce(lambda out, stage: stage(out), stages, x))(x)
    for microbatches in (1, 4, 5):
        found = quick(lambda x, count=microbatches: pipeline_forward(stages, x, count))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert len(np.unique(np.round(found, 6), axis=0)) == len(x)
    assert (found < 0).any()


def test_the_documented_gpipe_module_equals_its_layers_in_order():
    model = double(fill(lambda: GPipePipeline(3, 2, 8, rngs=nnx.Rngs(0))))
    x = jnp.asarray(inputs(7, 8))
    graphdef, params = nnx.split(model)

    def in_order(params):
        model = nnx.merge(graphdef, params)
        return functools.reduce(lambda out, n: model.forward_stage(n, out), range(3), x)

    def by_microbatches(params):
        return nnx.merge(graphdef, params)(x, num_microbatches=3)

    for function in (lambda f: f, lambda f: jax.grad(lambda p: (f(p) ** 2).sum())):
        found, expected = (quick(function(f))(params) for f in (by_microbatches, in_order))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    np.testing.assert_allclose(quick(lambda p: nnx.merge(graphdef, p)(x))(params), in_order(params))


def test_too_many_microbatches_are_refused_with_the_number_that_works():
    with pytest.raises(UserError, match="num_microbatches=3"):
        pipeline_forward(mlp_stages(), jnp.asarray(inputs(3)), 4)


def test_state_of_a_stage_goes_from_microbatch_to_microbatch():
    def layers():
        return [
            nnx.Linear(24, 8, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(8, rngs=nnx.Rngs(1)),
            double(nnx.Linear(8, 5, rngs=nnx.Rngs(2))),
        ]

    x, y = inputs(8), labels(8)
    pipeline = Pipeline(
        layers(), loss=cross_entropy, example=x, num_microbatches=2, devices=jax.devices()[:3]
    )
    pipeline.loss_and_gradients(x, y)
    first, norm, _ = layers()
    for piece in np.array_split(x, 2):
        norm(first(jnp.asarray(piece)))
    np.testing.assert_allclose(pipeline.modules()[1].mean[...], norm.mean[...], rtol=1e-6)


def test_five_clipped_updates_are_those_of_one_device():
    x, y = inputs(), labels()
    graphdef, params = nnx.split(nnx.List(mlp_stages()[:2]))
    optimizer = optax.adam(1e-2)
    whole = optax.chain(optax.clip_by_global_norm(0.3), optimizer)

    def loss(params):
        layers = nnx.merge(graphdef, params)
        return cross_entropy(functools.reduce(lambda out, f: f(out), layers, jnp.asarray(x)), y)

    @quick
    def update(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = whole.update(gradients, state)
        return value, optax.tree.norm(gradients), optax.apply_updates(params, updates), state

    pipeline = Pipeline(
        mlp_stages()[:2],
        loss=cross_entropy,
        example=x,
        num_microbatches=3,
        devices=jax.devices()[:2],
    )
    states, state = pipeline.init(optimizer), whole.init(params)
    before = pipeline.params
    for _ in range(5):
        found, states = pipeline.update(optimizer, states, x, y, clip_norm=0.3)
        expected, norm, params, state = update(params, state)
        assert norm > 0.3
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    pairs = zip(jax.tree.leaves(pipeline.params), jax.tree.leaves(params), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert [leaf.sharding.device_set for leaf in jax.tree.leaves(states[1])] == [
        {jax.devices()[1]}
    ] * len(jax.tree.leaves(states[1]))
    assert np.isfinite(before[0][0].layers[0].kernel).all()
    model = nnx.Sequential(*pipeline.modules())
    np.testing.assert_allclose(quick(model)(jnp.asarray(x)), pipeline(x), rtol=1e-12)


def test_calling_is_evaluation_and_gradients_are_training():
    def drop(rate):
        return Pipeline(
            [nnx.Dropout(rate, rngs=nnx.Rngs(0)), linen.Dropout(rate, deterministic=True)],
            loss=lambda output, target: (output * target).mean(),
            example=x,
            num_microbatches=2,
            devices=jax.devices()[:2],
        )

    x = np.ones((8, 64))
    pipeline = drop(0.5)
    np.testing.assert_array_equal(pipeline(x), x)
    first, _ = pipeline.loss_and_gradients(x, x)
    second, _ = pipeline.loss_and_gradients(x, x)
    assert 0.5 < first < 1.5
    assert first != second
    with pytest.raises(UserError, match=r"layer 0 \(Dropout\)"):
        drop("half")


@pytest.mark.full
def test_linen_modules_come_back_with_their_values_and_go_on_from_them():
    layers = [jnp.tanh, linen.BatchNorm(use_running_average=False)]
    x = inputs(8, 4)

    def build(layers):
        return Pipeline(
            layers,
            loss=lambda output, target: ((output - target) ** 2).mean(),
            example=x,
            num_stages=1,
            num_microbatches=2,
            devices=jax.devices()[1:2],
        )

    pipeline = build(layers)
    pipeline.loss_and_gradients(x, x)
    norm = pipeline.modules()[1]
    _, variables = norm.unbind()
    assert np.abs(variables["batch_stats"]["mean"]).max() > 0
    mean, variance = variables["batch_stats"]["mean"], variables["batch_stats"]["var"]
    expected = (np.tanh(x) - mean) / np.sqrt(variance + norm.epsilon)
    np.testing.assert_allclose(pipeline(x), expected, rtol=1e-5)
    np.testing.assert_allclose(build([jnp.tanh, norm])(x), pipeline(x), rtol=1e-12)


def test_what_is_worth_changing_is_said_in_arguments_of_python():
    layers = [double(fill(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))) for _ in range(4)]
    pipeline = Pipeline(
        layers, loss=cross_entropy, example=inputs(8, 8), num_stages=3, num_microbatches=3
    )
    text = "\n".join(pipeline.warnings())
    assert "2 of 8 devices are not used" in text
    assert "num_stages=2 or num_stages=4 uses all" in text
    assert "num_microbatches=12" in text
    assert "pipeline." not in text
    assert repr(pipeline).splitlines() == [
        "Pipeline: 3 stages, 1f1b with 3 microbatches",
        "  stage 0: layers 0–1, 144 parameters, 768 FLOPs a microbatch, devices 0, 1",
        "  stage 1: layer 2, 72 parameters, 384 FLOPs a microbatch, devices 2, 3",
        "  stage 2: layer 3, 72 parameters, 384 FLOPs a microbatch, devices 4, 5",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_better_number_of_stages_is_as_good_as_promised(schedule):
    widths = (64, 32, 32, 16, 16, 16, 16, 8, 8)
    shapes = list(itertools.pairwise(widths))
    layers = [double(fill(lambda s=s: nnx.Linear(*s, rngs=nnx.Rngs(0)))) for s in shapes]
    arguments = {"loss": cross_entropy, "example": inputs(32, 64), "num_microbatches": 24}
    now = Pipeline(layers, num_stages=4, schedule=schedule, **arguments)
    text = next(text for text in now.warnings() if "more work than the mean" in text)
    found = re.search(r"num_stages=(\d) waits (\d+)%", text)
    better = Pipeline(layers, num_stages=int(found[1]), schedule=schedule, **arguments)
    assert f"{float(better.timeline().bubble):.0%}" == f"{found[2]}%"
    assert better.timeline().bubble < now.timeline().bubble


def test_mw_names_the_pipeline():
    assert mw.pipeline.Pipeline is Pipeline
    assert mw.pipeline.PipelineStage is PipelineStage
    assert "Pipeline" in dir(mw.pipeline)
