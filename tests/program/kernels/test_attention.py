"""Attention is found however it is written, and evaluated to the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.attention_forms import (
    CHANNELS,
    HEADS,
    LENGTH,
    NOT_REPLACED,
    REPLACED,
    SAMPLES,
)
from program.kernels.kernel_runs import assembled, assert_equal, both, side_by_side, uses_in

from meshwright.program.kernels import masks, surroundings

FORMS = REPLACED | NOT_REPLACED
EVERYDAY = (
    *("grouped", "queries_last", "cross", "packed_twice_masked", "soft_cap_window"),
    *("padded", "sigmoid"),
)


class Attention(nnx.Module):
    """A projection before one form of attention."""

    def __init__(self, form, rngs):
        self.form = form
        self.qkv = nnx.Param(jax.random.normal(rngs.params(), (3, 8, HEADS, CHANNELS)))

    def __call__(self, x, batch):
        q, k, v = jnp.einsum("btd,ndhc->nbthc", x, self.qkv[...])
        return self.form(q, k, v, batch)


build = functools.partial(side_by_side, Attention, FORMS)


def loss(model, batch):
    found = {n: jnp.mean(jnp.sin(getattr(model, n)(batch["x"], batch))) for n in model.names}
    return sum(found.values()), found


def batch():
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(SAMPLES, LENGTH, 8)).astype(np.float32),
        "segments": np.sort(random.integers(4, size=(SAMPLES, LENGTH), dtype=np.int32), axis=1),
        "hidden": random.integers(2, size=(SAMPLES, LENGTH)) > 0,
    }


@pytest.fixture(scope="module", params=["no", pytest.param("bf16", marks=pytest.mark.full)])
def uses(request):
    """What is found; in half precision, sums have conversions around them."""
    options = {"wide": False, "precision": request.param}
    return assembled(build(FORMS), loss, batch(), "xla", **options).decision.kernels.uses


@pytest.mark.parametrize("name", REPLACED)
def test_a_form_is_found(uses, name):
    (use,) = uses_in(name, uses, "attention")
    assert (use.kernel, use.detail, use.reason) == ("xla", REPLACED[name][1], "")


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_what_is_more_than_attention_stays_as_written(uses, name):
    (use,) = uses_in(name, uses, "attention")
    assert use.kernel == ""
    assert NOT_REPLACED[name][1] in use.reason


@pytest.fixture(scope="module")
def everyday_runs():
    return both(build(EVERYDAY), loss, batch())


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_form_equals_the_plain_program(everyday_runs, name):
    assert_equal(*everyday_runs, under=f"{name}.")


@pytest.mark.full
def test_every_form_equals_the_plain_program():
    assert_equal(*both(build(FORMS), loss, batch()))


def test_a_constant_is_traced_once_and_its_bytes_are_not_kept(monkeypatch):
    traced, known, make = [], {}, surroundings.Scope._make_constant

    def count(scope, variable):
        program = make(scope, variable)
        traced.extend([] if program is None else [variable])
        return program

    monkeypatch.setattr(surroundings.Scope, "_make_constant", count)
    monkeypatch.setattr(masks, "_known", known)
    assembled(build(["another_numpy_mask", "grouped"]), loss, batch(), "xla")
    assert len(traced) == len(set(traced)) > 0
    digests = [digest for (_, consts), *_ in known for *_, digest in consts]
    assert {len(digest) for digest in digests} == {32}
