"""Cross entropy against float64 numpy, for every width of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright import UserError
from meshwright.tasks.task import cross_entropy, is_correct

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(scale=5.0, size=(4, 6, 32))
LABELS = RANDOM.integers(32, size=(4, 6)).astype(np.int32)


def reference(logits):
    exponent = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = exponent / exponent.sum(axis=-1, keepdims=True)
    return -np.log(np.take_along_axis(probabilities, LABELS[..., None], axis=-1)[..., 0])


def test_equals_float64_numpy():
    got = jax.jit(cross_entropy)(LOGITS.astype(np.float32), LABELS)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(LOGITS), rtol=2e-6, atol=2e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = LOGITS.astype(jnp.bfloat16)
    got = jax.jit(cross_entropy)(logits, LABELS)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(logits.astype(np.float64)), rtol=2e-6, atol=2e-6)


def test_float64_logits_stay_float64():
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(cross_entropy)(LOGITS, LABELS))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, reference(LOGITS), rtol=1e-13)


def test_huge_logits_do_not_overflow():
    logits = np.array([[1e30, 0.0, -1e30]], np.float32)
    np.testing.assert_array_equal(jax.jit(cross_entropy)(logits, np.array([0])), [0.0])


@pytest.mark.parametrize(
    ("returned", "message"), [((LOGITS, None), "returns a tuple"), (LOGITS[0], r"shape \(6, 32\)")]
)
def test_what_is_no_logits_is_refused(returned, message):
    with pytest.raises(UserError, match=message):
        cross_entropy(returned, LABELS)


def test_gradient_is_softmax_minus_one_hot():
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, LABELS).sum()))
    got = gradient(LOGITS.astype(np.float32))
    exponent = np.exp(LOGITS - LOGITS.max(axis=-1, keepdims=True))
    expected = exponent / exponent.sum(axis=-1, keepdims=True) - np.eye(32)[LABELS]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_logits_split_over_the_vocabulary_are_never_gathered():
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    logits = jax.ShapeDtypeStruct(LOGITS.shape, np.float32, sharding=split)
    step = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, LABELS).sum()))
    program = step.lower(logits).compile().as_text()
    assert "all-reduce" in program
    assert "all-gather" not in program


@pytest.mark.parametrize(("label", "expected"), [(1, True), (2, False), (0, False)])
def test_only_the_first_highest_logit_is_correct(label, expected):
    logits = np.array([[0.0, 7.0, 7.0]], np.float32)
    assert bool(is_correct(logits, np.array([label]))[0]) is expected
