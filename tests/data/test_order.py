"""The global order: every sample once an epoch, the same whoever asks for which part of it."""

import numpy as np
import pytest

from meshwright.data import order
from meshwright.data.order import sample_ids

pytestmark = pytest.mark.quick

METHODS = {"table": 2**20, "network": 1}
"""The most samples sorted into a table: all sizes below, or (nearly) none."""


@pytest.fixture(params=METHODS)
def method(request, monkeypatch):
    monkeypatch.setattr(order, "TABLE_SAMPLES", METHODS[request.param])


def ids_of(step: int, rows=None, **settings) -> np.ndarray:
    settings = {"seed": 0, "batch_size": 16, "num_samples": 1000, **settings}
    return sample_ids(step=step, rows=rows, **settings)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 64, 65, 1000])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_every_sample_comes_once_in_every_epoch(method, num_samples, batch_size):
    steps = 3 * num_samples // batch_size + 1
    settings = {"batch_size": batch_size, "num_samples": num_samples}
    got = np.concatenate([ids_of(step, **settings) for step in range(steps)])
    for epoch in range(3):
        part = got[epoch * num_samples : (epoch + 1) * num_samples]
        np.testing.assert_array_equal(np.sort(part), np.arange(num_samples))


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_the_rows_of_all_processes_are_the_global_batch(method, num_processes):
    for step in (0, 3, 61, 62, 125):
        rows = np.split(np.arange(16), num_processes)
        parts = [ids_of(step, rows=part) for part in rows]
        np.testing.assert_array_equal(np.concatenate(parts), ids_of(step))


def test_epochs_and_seeds_have_orders_of_their_own(method):
    orders = {
        tuple(ids_of(step, batch_size=1000, seed=seed)) for step in (0, 1, 2) for seed in (0, 1)
    }
    assert len(orders) == 6


def test_unshuffled_samples_come_by_their_number():
    got = np.concatenate(
        [ids_of(step, batch_size=7, num_samples=10, shuffle=False) for step in (0, 1)]
    )
    np.testing.assert_array_equal(got, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3])


def test_the_order_looks_random(method):
    got = np.concatenate([ids_of(s, batch_size=1000, num_samples=100_000) for s in range(100)])
    # Of random permutations: the rank correlation deviates by 1/√n, one element stays in place on
    # average, and neighbours follow each other about twice.
    correlation = np.corrcoef(got, np.arange(100_000))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(100_000)
    assert (got == np.arange(100_000)).sum() < 10
    assert (np.abs(np.diff(got)) == 1).sum() < 15
    halves = [(part < 50_000).mean() for part in np.split(got, 100)]
    np.testing.assert_allclose(halves, 0.5, atol=5 * 0.5 / np.sqrt(1000))


def test_small_epochs_are_fair():
    # Where sample 0 of 5 comes in many epochs: each place with the chance 1/5.
    got = ids_of(0, batch_size=5 * 4000, num_samples=5).reshape(-1, 5)
    counts = np.array(
        [[(got[:, place] == sample).sum() for place in range(5)] for sample in range(5)]
    )
    # Five standard deviations of a binomial count.
    np.testing.assert_allclose(counts, 800, atol=5 * np.sqrt(4000 * 0.2 * 0.8))


def test_huge_datasets_need_no_table():
    ids = ids_of(10**9, num_samples=10**13, batch_size=256)
    assert len(set(ids.tolist())) == 256
    assert ids.min() >= 0
    assert ids.max() < 10**13
