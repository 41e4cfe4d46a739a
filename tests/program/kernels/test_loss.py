"""The last projection and its loss are found, and evaluated in parts to the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import (
    assembled,
    assert_equal,
    both,
    side_by_side,
    uses_in,
)
from program.kernels.loss_forms import CLASSES, NOT_REPLACED, REPLACED

from meshwright.program.kernels import chunked_loss

FORMS = REPLACED | NOT_REPLACED
EVERYDAY = ("smoothed", "token_weights", "distilled", "with_accuracy")
SAMPLES, LENGTH, WIDTH = 4, 12, 8


class Head(nnx.Module):
    """A layer, the last projection and a loss."""

    def __init__(self, form, rngs, *, bias=True):
        self.form, self.has_bias = form, bias
        self.layer = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, CLASSES)))
        if bias:
            self.bias = nnx.Param(jax.random.normal(rngs.params(), (CLASSES,)))

    def __call__(self, batch):
        logits = jnp.tanh(batch["x"] @ self.layer[...]) @ self.kernel[...]
        return self.form(logits + self.bias[...] if self.has_bias else logits, batch)


build = functools.partial(side_by_side, Head, FORMS)


def loss(model, batch):
    found = {name: getattr(model, name)(batch) for name in model.names}
    return sum(found.values())


def make_batch(samples=SAMPLES, length=LENGTH):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(samples, length, WIDTH)).astype(np.float32),
        "labels": random.integers(CLASSES, size=(samples, length), dtype=np.int32),
        "weights": random.uniform(size=(samples, length)).astype(np.float32),
        "teacher": random.normal(size=(samples, length, CLASSES)).astype(np.float32),
    }


@pytest.fixture(scope="module", params=["no", pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def found(request):
    """A precision, and what is found in it."""
    options = {"wide": False, "precision": request.param}
    put_together = assembled(build(FORMS), loss, make_batch(), "xla", **options)
    return request.param, put_together.decision.kernels.uses


@pytest.mark.parametrize("name", REPLACED)
def test_a_loss_is_found(found, name):
    precision, uses = found
    (use,) = uses_in(name, uses, "loss")
    # The scale of the loss in fp16 is applied before its gradients are computed.
    expected = "recomputed" if precision == "fp16" else REPLACED[name][1]
    assert (use.kernel, use.reason) == (expected, "")


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_a_loss_that_mixes_rows_or_shows_logits_stays_as_written(found, name):
    (use,) = uses_in(name, found[1], "loss")
    assert use.kernel == ""
    assert NOT_REPLACED[name][1] in use.reason


@pytest.fixture(scope="module")
def everyday_runs():
    return both(build(EVERYDAY), loss, make_batch())


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_loss_equals_the_plain_program(everyday_runs, name):
    assert_equal(*everyday_runs, under=f"{name}.")


@pytest.mark.full
def test_every_loss_equals_the_plain_program():
    assert_equal(*both(build(FORMS), loss, make_batch()))


PARTS = [
    (4, 12, 32, (0, 2)),
    pytest.param(1, 24, 2, (1, 12), marks=pytest.mark.full),
    pytest.param(1, 15, 4, (1, 5), marks=pytest.mark.full),
    pytest.param(11, 2, 2, (0, 11), marks=pytest.mark.full),
]


def test_wide_rows_are_divided_into_fewer_parts():
    """Each part reads and writes the sums of the weight's gradients."""
    assert chunked_loss.most_rows(50_304, 768) == 8192
    assert chunked_loss.most_rows(262_144, 1152) == 4096
    assert chunked_loss.most_rows(262_144, 0) == 2048
    assert chunked_loss.most_rows(128_256, 8192) == 8192


@pytest.mark.parametrize(("samples", "length", "rows", "division"), PARTS)
def test_parts_of_the_rows_equal_all_at_once(monkeypatch, samples, length, rows, division):
    """Along either dim, unrolled and in a loop."""
    for name in ("ENTRIES", "MOST_ENTRIES"):
        monkeypatch.setattr(chunked_loss, name, rows * CLASSES)
    monkeypatch.setattr(chunked_loss, "FEWEST_ROWS", 1)
    most = chunked_loss.most_rows(CLASSES, 1)
    assert chunked_loss.division((samples, length), most) == division
    batch = make_batch(samples, length)
    assert_equal(*both(build(["token_weights", "per_sample"]), loss, batch))
