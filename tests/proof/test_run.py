"""What a certificate does with numbers that are not finite; broken steps are in tests/mutations."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from proof.proofs import Plain, batch_of, certify, failures, weighted_loss

import meshwright as mw
from meshwright.errors import UserError
from meshwright.proof import reference, run
from meshwright.step import train_step

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


@pytest.mark.full
def test_what_is_not_broken_is_certified():
    assert certify({"data": 2, "fsdp": 2, "tensor": 2}, clip_norm=0.5).equal


@pytest.fixture
def gradients_on_one_device(monkeypatch):
    """The gradients of batches as one device computed them, in order."""
    computed = []
    right = reference.Reference._batch_gradient

    def recorded(self, params, state, batch, scale):
        found = right(self, params, state, batch, scale)
        computed.append({path: value.copy() for path, value in found.gradients.items()})
        return found

    monkeypatch.setattr(reference.Reference, "_batch_gradient", recorded)
    return computed


def test_one_device_computes_every_gradient_once(gradients_on_one_device):
    """In float64 and in float32, of two steps each; float32 is also the loss as written."""
    assert certify({"data": 2}, model=Plain, optimizer=optax.sgd(0.1)).equal
    first, again, *_ = [found["up.kernel"] for found in gradients_on_one_device]
    assert len(gradients_on_one_device) == 4
    assert not np.allclose(first, again)


def moments_that_become_float32():
    """Return momentum whose state starts in bfloat16 and is float32 after the first step."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.bfloat16), params)

    def update(updates, state, params=None):
        moments = jax.tree.map(lambda m, u: 0.5 * m + u, state, updates)
        return jax.tree.map(lambda m: -0.1 * m, moments), moments

    return optax.GradientTransformation(init, update)


@pytest.mark.full
def test_an_optimizer_whose_state_changes_its_format():
    """The step is compiled for its first call, and again for the second."""
    assert certify({"fsdp": 2}, model=Plain, optimizer=moments_that_become_float32()).equal


def test_a_proof_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(run, "process_count", lambda: 2)
    with pytest.raises(
        UserError, match=r"verify cannot run in 2 processes(.|\n)*mw.simulate_devices\(8\)"
    ):
        certify({"data": 2})


@pytest.mark.full
@pytest.mark.parametrize("clip_norm", [None, 0.01])
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.full
def test_a_gradient_that_is_not_finite(break_gradients, value):
    break_gradients(
        lambda gradients, *_: with_leaf(gradients, "norm.scale", lambda g: g.at[0].set(value))
    )
    broken = failures(certify({"fsdp": 2}, steps=1))
    for name in ("float64 gradients", "float64 parameters", "own_precision gradients"):
        assert broken[name].first_different == "norm.scale"
        assert broken[name].first_difference is None


def batches_with_nan_at(number):
    def batches(step):
        batch = batch_of(step)
        batch["x"][0, 0] = np.nan if step == number else 0.0
        return batch

    return batches


@pytest.mark.full
def test_a_later_loss_that_is_not_finite_on_one_device_is_named_by_its_step():
    with pytest.raises(UserError, match="the loss of step 2 is nan on one device") as error:
        certify({"data": 2}, batches=batches_with_nan_at(1), steps=2)
    assert "steps=1" in error.value.fix


class Half(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 4, param_dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


@pytest.mark.full
def test_half_precision_parameters_that_are_lost_on_both_sides_are_not_compared():
    # In float16 Adam's epsilon is 0: an input that is 0 everywhere gives 0 / 0.
    def batches(step):
        batch = batch_of(step)
        batch["x"][:, 0] = 0.0
        return batch

    certificate = certify({"fsdp": 2}, model=Half, batches=batches, optimizer=optax.adam(1e-3))
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert certificate.verdict() == "equal to one device, as far as can be judged"
    not_finite = "in the plan's precision: they are not finite, on the mesh and on one device alike"
    assert certificate.not_compared == [
        f"loss and gradients of step 2 {not_finite}",
        f"parameters of steps 1 to 2 {not_finite}",
    ]


@pytest.mark.full
def test_a_first_loss_that_is_not_finite_is_a_mistake_of_the_user():
    with pytest.raises(UserError, match="the loss of the first batch is nan on one device"):
        certify({"data": 2}, batches=batches_with_nan_at(0), steps=1)


class Noisy(Plain):
    """Adds noise in the format of its activations."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.noise = rngs.noise.fork()

    def __call__(self, x):
        hidden = self.up(x)
        return self.down(hidden + jax.random.normal(self.noise(), hidden.shape, hidden.dtype))


# Dropout, which draws bits of one precision, is proven every day in tests/parity.
@pytest.mark.full
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_noise_whose_bits_depend_on_the_precision(precision):
    certificate = certify({"fsdp": 2}, model=Noisy, precision=precision, steps=1)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]


def test_the_step_that_is_proven_is_the_one_that_is_trained(monkeypatch):
    """A trainer's step leaves out updates that are not finite; only such a step is broken here."""
    right = train_step.TrainStep._accept

    def broken(self, before, after, gradients, metrics):
        state, metrics = right(self, before, after, gradients, metrics)
        if state.halted is not None:
            state = dataclasses.replace(state, params=[1.01 * p for p in state.params])
        return state, metrics

    monkeypatch.setattr(train_step.TrainStep, "_accept", broken)
    trainer = mw.Trainer(
        model=lambda rngs: Plain(rngs=rngs),
        loss=weighted_loss,
        optimizer=optax.adamw(1e-3),
        mesh="fsdp=2",
        devices=jax.devices()[:2],
    )
    found = failures(trainer.verify([batch_of(0)], steps=1))
    assert {"float64 parameters", "own_precision parameters"} <= found.keys()
