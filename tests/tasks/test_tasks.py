"""What every task promises: found by kind, batches that fit their description and repeat."""

import jax
import numpy as np
import pytest

from meshwright.tasks import TASK_KINDS, find_task

pytestmark = pytest.mark.quick

KINDS = [kind for kind in TASK_KINDS if kind != "grpo"]
"""The batches of GRPO come from rollouts."""


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_batch_fits_the_example_batch(kind):
    task = find_task(kind)()
    example, batch = task.example_batch(3), task.synthetic_batch(0, 3)
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == {
        name: (a.shape, a.dtype) for name, a in example.items()
    }
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in example.values())


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_batch_is_a_function_of_the_seed(kind):
    task = find_task(kind)()
    first, again, other = (task.synthetic_batch(seed, 4) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_are_frozen_values(kind):
    task = find_task(kind)
    assert task() == task()
    assert hash(task()) == hash(task())
