"""Trees of arrays: random keys, and the samples of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.trees import (
    check_num_samples,
    divide_batch,
    is_key,
    key_data,
    resize_batch,
    tokens_per_sample,
)

pytestmark = pytest.mark.quick

BATCH = {"x": np.zeros((8, 3), np.float32), "y": [jax.ShapeDtypeStruct((8,), np.int32)]}


def shapes(batch):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)]


def test_keys_are_told_from_numbers_by_array_and_by_dtype():
    key = jax.random.key(0)
    assert is_key(key)
    assert is_key(key.dtype)
    assert not is_key(jax.random.key_data(key))
    assert not is_key(np.zeros(2))
    assert not is_key(jnp.dtype("uint32"))


def test_keys_become_their_words_and_numbers_stay():
    key, numbers = jax.random.key(3), np.arange(3)
    np.testing.assert_array_equal(key_data(key), jax.random.key_data(key))
    assert key_data(numbers) is numbers


def test_a_batch_of_another_size_keeps_everything_but_dim_0():
    assert shapes(resize_batch(BATCH, 2)) == [((2, 3), np.float32), ((2,), np.int32)]
    assert shapes(divide_batch(BATCH, 4)) == shapes(resize_batch(BATCH, 2))
    assert jax.tree.structure(resize_batch(BATCH, 2)) == jax.tree.structure(BATCH)


def test_arrays_have_equally_many_samples_and_at_least_one():
    assert check_num_samples({"x": 4, "y": 4}, "the batch") == 4
    with pytest.raises(UserError, match="the arrays of the batch have different") as caught:
        check_num_samples({"x": 4, "y": 3}, "the batch")
    assert caught.value.why == "x: 4, y: 3"
    with pytest.raises(UserError, match="the batch has no samples"):
        check_num_samples({"x": 0}, "the batch")


def rows(length, dtype=np.int32):
    return jax.ShapeDtypeStruct((8, length), dtype)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"tokens": rows(65), "mask": rows(64)}, 64),
        ({"tokens": rows(65, np.uint8)}, 64),
        ({"inputs": rows(64), "targets": rows(64)}, 64),
        ({"input_ids": rows(64), "attention_mask": rows(64), "labels": rows(64)}, 64),
        ({"text": rows(64), "weights": rows(64, np.float32)}, 64),
        ({"deep": [rows(64)], "class": jax.ShapeDtypeStruct((8,), np.int32)}, 64),
        ({"source": rows(64), "target": rows(32)}, None),
        ({"inputs": rows(64, np.float32)}, None),
        ({"pixels": rows(784, np.uint8)}, None),
        ({"x": rows(64, np.float32), "class": rows(1)}, None),
        (BATCH, None),
        (rows(64), 64),
    ],
)
def test_tokens_are_counted_in_the_array_that_has_them(batch, count):
    assert tokens_per_sample(batch) == count
