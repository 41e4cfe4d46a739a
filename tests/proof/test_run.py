"""A certificate that cannot fail is worthless: broken steps are caught, and the leaf is named.

Only the step is broken, never the reference it is compared with.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proof.proofs import Plain, batch_of, certify, failures

from meshwright.errors import UserError
from meshwright.program.on_mesh import products
from meshwright.program.trace import traced_loss as trace
from meshwright.proof import run
from meshwright.step import assemble, microbatch, optimizer, train_step
from meshwright.step import local_accumulation as local

PARAMS = ["down.bias", "down.kernel", "norm.bias", "norm.scale", "up.bias", "up.kernel"]
"""The trained leaves of `Net` in the order of the step."""


@pytest.fixture
def break_gradients(monkeypatch):
    """Let the step's gradients be changed by ``change(gradients, right, *arguments)``."""

    def replace(change):
        right = train_step.compute_gradients

        def broken(*arguments):
            return change(right(*arguments), right, *arguments)

        monkeypatch.setattr(train_step, "compute_gradients", broken)

    return replace


def with_leaf(gradients, path, change):
    values = list(gradients.values)
    values[PARAMS.index(path)] = change(values[PARAMS.index(path)])
    return dataclasses.replace(gradients, values=values)


def test_what_is_not_broken_is_certified():
    assert certify({"data": 2, "fsdp": 2, "tensor": 2}, clip_norm=0.5).equal


def test_a_proof_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(run, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"verify cannot run in 2 processes(.|\n)*simulate=8"):
        certify({"data": 2})


@pytest.mark.parametrize("clip_norm", [None, pytest.param(0.01, marks=pytest.mark.full)])
def test_a_sum_over_replicas_instead_of_their_mean(break_gradients, clip_norm):
    break_gradients(
        lambda gradients, *_: dataclasses.replace(
            gradients, values=[4 * g for g in gradients.values]
        )
    )
    broken = failures(certify({"data": 4}, clip_norm=clip_norm))
    assert {"float64 gradients", "own_precision gradients"} <= set(broken)
    # Clipping undoes the factor: the parameters become what they should be.
    assert ("float64 parameters" in broken) == (clip_norm is None)
    assert broken["float64 gradients"].first_different == "down.bias"
    assert broken["float64 gradients"].first_difference == pytest.approx(3.0)


@pytest.mark.full
def test_one_leaf_that_is_not_reduced(break_gradients):
    """One leaf's gradient is that of the first device's samples."""

    def change(gradients, right, function, params, state, batch, scale):
        alone = [jnp.tile(leaf[:4], (4,) + (1,) * (leaf.ndim - 1)) for leaf in batch]
        own = right(function, params, state, alone, scale)
        number = PARAMS.index("norm.scale")
        return with_leaf(gradients, "norm.scale", lambda _: own.values[number])

    break_gradients(change)
    broken = failures(certify({"fsdp": 4}))
    assert broken["float64 gradients"].first_different == "norm.scale"
    assert broken["float64 gradients"].first_difference > 1e-3
    assert broken["float64 parameters"].first_different is not None
    assert broken["own_precision gradients"].first_different == "norm.scale"


def test_a_missing_reduction_between_devices(monkeypatch):
    """Each device adds up its own gradients, and nobody adds those of the devices."""
    monkeypatch.setattr(local.jax.lax, "psum", lambda value, axes: value)
    broken = failures(certify({"data": 4}, model=Plain, accumulation=2, sync=2))
    assert {"float64 loss", "float64 gradients", "float64 parameters"} <= set(broken)
    assert broken["float64 gradients"].first_different == "down.bias"


def test_a_replica_left_out(break_gradients):
    """An eighth of the samples is lost, in a format whose own errors are not small."""

    def change(gradients, right, function, params, state, batch, scale):
        weight, *rest = batch
        left = right(function, params, state, [weight.at[:2].set(0), *rest], scale)
        return dataclasses.replace(gradients, values=left.values)

    break_gradients(change)
    broken = failures(certify({"data": 8}, model=Plain, precision="bf16"))
    assert {"float64 gradients", "own_precision gradients"} <= set(broken)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("repeated", marks=pytest.mark.full),
        "dropped",
        pytest.param("contiguous", marks=pytest.mark.full),
    ],
)
def test_a_wrong_microbatch(monkeypatch, kind):
    right = microbatch.split_strided

    def split(batch, count, *rest):
        if kind == "contiguous":
            return [leaf.reshape(count, -1, *leaf.shape[1:]) for leaf in batch]
        leaves = right(batch, count, *rest)
        if kind == "dropped":
            return [leaf[:-1] for leaf in leaves]
        return [jnp.concatenate([leaf[:1], leaf[:-1]]) for leaf in leaves]

    monkeypatch.setattr(train_step, "split_strided", split)
    broken = failures(certify({"data": 2}, accumulation=4))
    assert {"float64 loss", "float64 gradients", "float64 state"} <= set(broken)
    assert broken["float64 loss"].first_different == "update 0"


def test_microbatches_that_count_the_same_though_their_weights_differ(monkeypatch):
    right = train_step.accumulate_gradients

    def accumulate(function, *rest):
        def unweighted(*arguments):
            value = function(*arguments)
            one = jnp.ones_like(value.objective.weight)
            return dataclasses.replace(
                value,
                objective=dataclasses.replace(
                    value.objective, total=value.objective.mean, weight=one
                ),
            )

        return right(unweighted, *rest)

    monkeypatch.setattr(train_step, "accumulate_gradients", accumulate)
    broken = failures(certify({"fsdp": 2}, model=Plain, accumulation=4))
    assert {"float64 loss", "float64 gradients"} <= set(broken)


@pytest.mark.full
def test_two_leaves_taken_for_each_other(break_gradients):
    def change(gradients, *_):
        values = list(gradients.values)
        values[2], values[3] = values[3], values[2]
        return dataclasses.replace(gradients, values=values)

    break_gradients(change)
    broken = failures(certify({"tensor": 2}))
    assert broken["float64 gradients"].first_different == "norm.bias"
    assert broken["float64 parameters"].first_different is not None


def test_optimizer_state_that_is_not_updated_for_one_leaf(monkeypatch):
    right = optimizer.FlatOptimizer.update

    def update(self, gradients, leaves, params):
        changed, after = right(self, gradients, leaves, params)
        number = [leaf.path for leaf in self.leaves].index("1.0.mu.up.kernel")
        return changed, [*after[:number], leaves[number], *after[number + 1 :]]

    monkeypatch.setattr(optimizer.FlatOptimizer, "update", update)
    broken = failures(certify({"fsdp": 2}))
    assert "float64 gradients" not in broken
    assert broken["float64 parameters"].first_different == "up.kernel"


def test_dropout_that_draws_other_bits(monkeypatch):
    right = train_step.compute_gradients

    def compute(function, params, state, batch, scale):
        other = [s + 1 if s.dtype == jnp.uint32 and not s.ndim else s for s in state]
        return right(function, params, other, batch, scale)

    monkeypatch.setattr(train_step, "compute_gradients", compute)
    broken = failures(certify({"data": 2}))
    assert {"float64 loss", "float64 gradients"} <= set(broken)
    assert broken["float64 state"].first_different == "dropout.rngs.count"


def test_statistics_of_some_samples_only(monkeypatch):
    right = train_step.compute_gradients

    def compute(function, params, state, batch, scale):
        alone = [jnp.tile(leaf[:8], (2,) + (1,) * (leaf.ndim - 1)) for leaf in batch]
        state_alone = right(function, params, state, alone, scale).model_state
        return dataclasses.replace(
            right(function, params, state, batch, scale), model_state=state_alone
        )

    monkeypatch.setattr(train_step, "compute_gradients", compute)
    broken = failures(certify({"data": 2}))
    # Nothing that is trained depends on them: they are for evaluation.
    assert list(broken) == ["float64 state", "own_precision state"]
    assert all(state.first_different == "norm.mean" for state in broken.values())


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.full)])
def test_a_gradient_that_is_not_finite(break_gradients, value):
    break_gradients(
        lambda gradients, *_: with_leaf(gradients, "norm.scale", lambda g: g.at[0].set(value))
    )
    broken = failures(certify({"fsdp": 2}, steps=1))
    for name in ("float64 gradients", "float64 parameters", "own_precision gradients"):
        assert broken[name].first_different == "norm.scale"
        assert broken[name].first_difference is None


def batches_with_nan_at(update):
    def batches(step):
        batch = batch_of(step)
        batch["x"][0, 0] = np.nan if step == update else 0.0
        return batch

    return batches


def test_what_is_not_finite_on_both_sides_is_not_equal():
    broken = failures(certify({"data": 2}, batches=batches_with_nan_at(1), steps=2))
    assert {name for name in broken if "own" not in name} == {
        *("float64 loss", "float64 parameters", "float64 state"),
    }
    for part in ("float64", "own_precision"):
        assert broken[f"{part} loss"].first_different == "update 1"


def test_a_first_loss_that_is_not_finite_is_a_mistake_of_the_user():
    with pytest.raises(UserError, match="the loss of the first batch is nan on one device"):
        certify({"data": 2}, batches=batches_with_nan_at(0), steps=1)


def test_an_error_of_half_precision_alone(monkeypatch):
    """Float64 does not see what only half-precision programs do."""
    right = products._weight_gradient
    monkeypatch.setattr(products, "_weight_gradient", lambda *a, **k: 0.9 * right(*a, **k))
    broken = failures(certify({"fsdp": 2}, model=Plain, precision="bf16"))
    assert list(broken) == ["own_precision gradients"]
    assert broken["own_precision gradients"].first_different == "down.kernel"


def test_an_optimizer_that_is_wrong_outside_of_float64(monkeypatch):
    """Its moments lose half of their bits, from the second update on; gradients stay right."""
    right = optimizer.FlatOptimizer.update

    def update(self, gradients, leaves, params):
        changed, after = right(self, gradients, leaves, params)
        coarse = [
            leaf.astype(jnp.bfloat16).astype(leaf.dtype) if leaf.dtype == jnp.float32 else leaf
            for leaf in after
        ]
        kept = [leaf.path.startswith("0.gradients.") for leaf in self.leaves]
        return changed, [a if keep else c for a, c, keep in zip(after, coarse, kept, strict=True)]

    monkeypatch.setattr(optimizer.FlatOptimizer, "update", update)
    broken = failures(certify({"fsdp": 2}, model=Plain))
    assert list(broken) == ["own_precision parameters"]
    assert broken["own_precision parameters"].first_different == "down.bias"
    assert certify({"fsdp": 2}, model=Plain, steps=1).equal


def test_statistics_that_the_trace_drops(monkeypatch):
    """Both sides run the traced program, in which the statistics do not change."""
    right = trace.normalize

    def normalize(traced, paths, classes):
        closed = right(traced, paths, classes)
        given = [closed.jaxpr.invars[paths.index(path)] for path in ("norm.mean", "norm.var")]
        outputs = [*closed.jaxpr.outvars[:-2], *given]
        return closed.replace(jaxpr=closed.jaxpr.replace(outvars=outputs))

    monkeypatch.setattr(trace, "normalize", normalize)
    broken = failures(certify({"data": 2}, steps=1))
    assert list(broken) == ["as_written state"]
    assert broken["as_written state"].first_different == "norm.mean"


def test_initial_values_that_are_not_those_of_one_device(monkeypatch):
    right = assemble.Assembled.init
    monkeypatch.setattr(
        assemble.Assembled, "init", lambda self, seed, **how: right(self, seed + 1, **how)
    )
    broken = failures(certify({"fsdp": 2}, model=Plain))
    assert broken["own_precision initial values"].first_different == "down.kernel"


def test_a_trace_that_is_not_the_loss_as_written(monkeypatch):
    """Both sides run the traced program: only the loss as written shows that it is wrong."""
    right = trace.read_loss

    def read(out):
        objective, metrics = right(out)
        return dataclasses.replace(objective, total=1.01 * objective.total), metrics

    monkeypatch.setattr(trace, "read_loss", read)
    broken = failures(certify({"fsdp": 2}, model=Plain))
    assert list(broken) == ["as_written loss", "as_written gradients"]
    assert broken["as_written loss"].first_difference == pytest.approx(1 - 1 / 1.01, rel=1e-3)


class Noisy(Plain):
    """Adds noise in the format of its activations."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.noise = rngs.noise.fork()

    def __call__(self, x):
        hidden = self.up(x)
        return self.down(hidden + jax.random.normal(self.noise(), hidden.shape, hidden.dtype))


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.full), "bf16"])
def test_noise_whose_bits_depend_on_the_precision(precision):
    certificate = certify({"fsdp": 2}, model=Noisy, precision=precision, steps=1)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
