"""The traced loss is the user's loss: the same bits, the same changes of state, clear refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.programs import evaluate, quick, trace
from small_models import (
    WIDTH,
    Norms,
    Odd,
    Residuals,
    builder,
    fill,
    odd_batch,
    odd_loss,
    pair,
    pair_loss,
    plain_value,
    square_loss,
    task_batch,
    vectors,
    weighted_loss,
)

from meshwright import Weighted
from meshwright.errors import UserError
from meshwright.program.trace.traced_loss import read_loss

pytestmark = pytest.mark.quick

CASES = {
    "gpt": (builder("gpt"), *task_batch("gpt")),
    "linen": (builder("linen_mlp"), *task_batch("linen_mlp")),
    "lstm": (builder("lstm"), *task_batch("lstm")),
    "norms": (Norms, square_loss, vectors()),
    "odd": (Odd, odd_loss, odd_batch()),
    "pair": (pair, pair_loss, vectors()),
    "weighted": (Residuals, weighted_loss, {**vectors(), "weight": np.arange(16.0)}),
}


def run_plainly(model, loss, batch):
    """Run a loss as Flax users do; return its mean and the model afterwards."""
    graphdef, state = nnx.split(model)

    @quick
    def run(state, batch):
        model = nnx.merge(graphdef, state)
        value = plain_value(loss(model, batch))
        return value, nnx.state(model)

    value, after = run(state, batch)
    return value, nnx.merge(graphdef, after)


LONG = {"gpt", "lstm", "pair"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full) if c in LONG else c for c in sorted(CASES)]
)
def test_the_traced_loss_and_its_state_are_the_plain_ones_bit_for_bit(case):
    build, loss, batch = CASES[case]
    model = fill(build)
    model_leaves, traced = trace(build, loss, batch)
    value = evaluate(traced, model_leaves.values(model), batch)
    expected, after = run_plainly(model, loss, batch)
    assert quick(lambda w: w.total / w.weight)(value.objective) == expected
    afterwards = model_leaves.values(after)
    for ours, number in zip(value.state, model_leaves.indices("state"), strict=True):
        theirs, leaf = afterwards[number], model_leaves.leaves[number]
        assert ours.dtype == leaf.dtype, leaf.path
        assert jnp.array_equal(_bits(ours), _bits(theirs)), leaf.path


def _bits(array):
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def test_statistics_counters_and_streams_do_change():
    for build, loss, batch, changed in (
        (Norms, square_loss, vectors(), {"norm.mean", "norm.var", "dropout.rngs.count"}),
        (Odd, odd_loss, odd_batch(), {"calls"}),
    ):
        model_leaves, traced = trace(build, loss, batch)
        before = [traced.closed.jaxpr.invars[i] for i in model_leaves.indices("state")]
        after = traced.closed.jaxpr.outvars[-len(before) :]
        paths = [model_leaves.leaves[i].path for i in model_leaves.indices("state")]
        assert {p for p, a, b in zip(paths, after, before, strict=True) if a is not b} == changed


# Flax deprecates sowing outside of nnx.capture, but models that do it must still train.
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_are_ignored():
    class Sowing(Residuals):
        def __call__(self, x):
            y = super().__call__(x)
            self.sow(nnx.Intermediate, "out", y)
            return y

    model_leaves, traced = trace(Sowing, square_loss, vectors())
    assert model_leaves.indices("state") == []
    assert len(traced.closed.jaxpr.outvars) == 2


def test_a_constant_written_to_state_is_an_output():
    class Flag(Residuals):
        def __init__(self):
            super().__init__(2)
            self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.seen[...] = jnp.asarray(7, jnp.int32)
            return super().__call__(x)

    for rolled in (False, True):
        model_leaves, traced = trace(Flag, square_loss, vectors(), rolled=rolled)
        value = evaluate(traced, model_leaves.values(fill(Flag)), vectors())
        assert [int(x) for x in value.state] == [7]


def test_weights_the_loss_changes_itself_are_averaged_in_float32():
    def build():
        return {"student": nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), "teacher": teacher()}

    def teacher():
        return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def loss(models, batch):
        student, average = models["student"], models["teacher"]
        value = square_loss(student, batch)
        average.kernel[...] = 0.999 * average.kernel[...] + 0.001 * student.kernel[...]
        return value

    only = nnx.All(nnx.Param, nnx.PathContains("student"))
    models = fill(build)
    model_leaves, traced = trace(build, loss, vectors(), jnp.bfloat16, trainable=only)
    state = evaluate(traced, model_leaves.values(models), vectors()).state
    position = [model_leaves.leaves[i].path for i in model_leaves.indices("state")].index(
        "teacher.kernel"
    )
    moved = np.asarray(state[position], np.float64) - np.asarray(models["teacher"].kernel[...])
    step = 0.001 * (models["student"].kernel[...] - models["teacher"].kernel[...])
    # The student enters in bf16, so its share is exact to 2⁻⁸ of 0.001; the average itself to all.
    np.testing.assert_allclose(moved, step, rtol=0, atol=0.001 * 2**-7)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.mean(axis=1), r"not a scalar\nit has shape \(16,\) and type float32"),
        (lambda x: (x.mean(), x), "the loss is not a scalar"),
        (lambda x: None, "the loss is not a scalar\nit is None"),
        (lambda x: Weighted(x, x.sum()), "the loss is not a scalar"),
        (lambda x: (x.mean(), {"hidden": x}), "metric `hidden` is not a scalar"),
        (lambda x: [x.mean()], "the loss is not a scalar"),
    ],
)
def test_a_loss_that_is_not_a_scalar_is_refused(returned, message):
    with pytest.raises(UserError, match=message):
        trace(Residuals, lambda model, batch: returned(model(batch["x"])), vectors())


def test_metrics_may_be_numbers_means_and_weighted_sums():
    metrics = {
        "number": 3,
        "numpy": np.float64(0.5),
        "mean": jnp.asarray(2.0, jnp.bfloat16),
        "weighted": Weighted(jnp.asarray(6.0), 3),
    }
    objective, read = read_loss((Weighted(jnp.asarray(4.0), jnp.asarray(2)), metrics))
    assert objective.mean == 2
    assert {name: float(value.mean) for name, value in read.items()} == {
        "number": 3,
        "numpy": 0.5,
        "mean": 2,
        "weighted": 2,
    }
    assert {value.total.dtype for value in read.values()} == {jnp.dtype(jnp.float32)}


def test_metrics_keep_their_names_and_order():
    _, traced = trace(Odd, odd_loss, odd_batch())
    assert traced.metric_names == ("nats", "hidden")
    value = evaluate(traced, trace(Odd, odd_loss, odd_batch())[0].values(fill(Odd)), odd_batch())
    assert list(value.metrics) == ["nats", "hidden"]
    assert value.metrics["hidden"].weight == 16 * 6 * 32


def test_arrays_with_different_numbers_of_samples_are_refused_by_name():
    batch = {"x": np.zeros((16, WIDTH)), "y": np.zeros((8, WIDTH))}
    with pytest.raises(UserError, match=r"x: 16, y: 8"):
        trace(Residuals, square_loss, batch)


def test_batches_may_be_tuples_and_hold_host_integers():
    def loss(model, batch):
        tokens, *_ = batch
        return odd_loss(model, {"tokens": tokens})

    tokens = odd_batch()["tokens"].astype(np.int64)
    _, traced = trace(Odd, loss, (tokens, np.zeros(16)))
    assert [leaf.path for leaf in traced.batch] == ["0", "1"]
    assert traced.closed.in_avals[-2].dtype == jnp.int32


def test_a_traced_array_has_no_sharding():
    found = []

    def loss(model, batch):
        found.append(getattr(batch["x"], "sharding", None))
        with pytest.raises(AttributeError, match="sharding"):
            _ = batch["x"].sharding
        return square_loss(model, batch)

    own = vars(jax.core.Tracer)["sharding"]
    trace(Residuals, loss, vectors())
    assert found == [None]
    assert vars(jax.core.Tracer)["sharding"] is own
