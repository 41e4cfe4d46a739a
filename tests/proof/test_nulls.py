"""Leaves whose true gradient is zero: noise on both sides, which no optimizer may blow up."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from proof.proofs import certify, failures

from meshwright.step import train_step


class Stem(nnx.Module):
    """A bias before batch normalisation, whose running mean reads it."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.norm(self.up(x))))


class Late(nnx.Module):
    """A branch that starts at zero: what lies before its last layer has no gradient at first."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Shifted(nnx.Module):
    """x + softmax(x + shift): the same shift of every entry changes nothing."""

    def __init__(self, *, rngs):
        self.mix = nnx.Linear(8, 8, rngs=rngs)
        self.shift = nnx.Param(rngs.params.normal((1,)))

    def __call__(self, x):
        return x + self.mix(jax.nn.softmax(x + self.shift[...]))


class Fused(nnx.Module):
    """Attention with one bias for queries, keys and values; that of the keys changes nothing."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(2, 24, bias_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.down = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.split(self.up(x.reshape(-1, 4, 2)), 3, axis=-1)
        mixed = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k)) @ v
        return self.down(mixed.reshape(-1, 32))


@pytest.mark.full
def test_the_part_of_a_leaf_that_has_no_gradient():
    certificate = certify({"fsdp": 2}, model=Fused, optimizer=optax.adamw(0.1, eps=1e-20))
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert (certificate.null_leaves, certificate.null_parts) == ([], {"up.bias": 8})
    assert "1 leaf with a true gradient of zero" in str(certificate)
    assert "up.bias (8 elements)" in str(certificate)


@pytest.mark.full
def test_a_gradient_in_the_part_of_a_leaf_that_should_have_none(monkeypatch):
    leaves = ["down.bias", "down.kernel", "up.bias", "up.kernel"]
    change_gradient(monkeypatch, leaves.index("up.bias"), lambda g: g.at[9].add(1e-6))
    found = failures(certify({"data": 2}, model=Fused, steps=1))
    assert found["float64 gradients"].first_different == "up.bias"


class Stack(nnx.Module):
    """Blocks that can be rolled, each with a leaf that has no gradient."""

    def __init__(self, *, rngs):
        self.blocks = nnx.List([Shifted(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [optax.lion(0.1), optax.adamw(1.0, eps=1e-20)])
def test_optimizers_that_make_a_whole_step_of_noise(optimizer):
    certificate = certify({"fsdp": 4}, model=Stem, optimizer=optimizer, steps=3)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert certificate.null_leaves == ["up.bias"]


@pytest.mark.full
@pytest.mark.parametrize("blocks", ["scan", "unroll"])
def test_leaves_of_rolled_blocks(blocks):
    certificate = certify({"fsdp": 2}, model=Stack, optimizer=optax.lion(0.1), blocks=blocks)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert certificate.null_leaves == ["blocks.0.shift", "blocks.1.shift"]


@pytest.mark.full
def test_leaves_that_have_a_gradient_later_are_trained(monkeypatch):
    leaves = ["down.bias", "down.kernel", "up.bias", "up.kernel"]
    right = certify({"data": 2}, model=Late)
    assert right.equal
    assert right.null_leaves == ["up.bias", "up.kernel"]
    change_gradient(monkeypatch, leaves.index("up.kernel"), lambda gradient: 2 * gradient)
    found = failures(certify({"data": 2}, model=Late, optimizer=optax.sgd(0.1)))
    # Twice nothing is nothing in the first step, whose gradients are compared in float64.
    assert list(found) == ["float64 metrics", "float64 parameters", "own_precision gradients"]
    assert found["own_precision gradients"].first_different == "up.kernel"
    assert found["float64 parameters"].first_different == "up.kernel"


@pytest.mark.full
def test_a_gradient_where_there_should_be_none(monkeypatch):
    leaves = ["down.bias", "down.kernel", "norm.bias", "norm.scale", "up.bias", "up.kernel"]
    change_gradient(monkeypatch, leaves.index("up.bias"), lambda gradient: gradient + 1e-6)
    found = failures(certify({"data": 2}, model=Stem))
    assert found["float64 gradients"].first_different == "up.bias"


def change_gradient(monkeypatch, number, change):
    """Break the step: change the gradient of one leaf."""
    right = train_step.compute_gradients

    def broken(*arguments):
        found = right(*arguments)
        values = [change(g) if n == number else g for n, g in enumerate(found.values)]
        return dataclasses.replace(found, values=values)

    monkeypatch.setattr(train_step, "compute_gradients", broken)
