"""The global order of samples: a function of the seed and the step alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

TABLE_SAMPLES = 2**20
"""Epochs of up to this many samples are shuffled by sorting a table. Larger ones are permuted by a
Feistel network, which needs no memory but is less uniform for few samples."""

ROUNDS = 6
"""Rounds of the Feistel network: four look random, two more are cheap."""


def sample_ids(
    *,
    seed: int,
    step: int,
    batch_size: int,
    num_samples: int,
    rows: NDArray[np.int64] | None = None,
    shuffle: bool = True,
) -> NDArray[np.int64]:
    """Return the samples of one update: epoch after epoch, each shuffled anew.

    The result does not depend on processes, devices or earlier calls, so any process can compute
    the rows it needs, and a resumed run sees the same samples as an uninterrupted one.

    Args:
        seed: seed of the run.
        step: the update, from 0.
        batch_size: samples of the global batch.
        num_samples: samples of the dataset; an epoch has each exactly once.
        rows: the rows of the batch to return; all by default.
        shuffle: whether each epoch is shuffled anew, or goes through the samples in order.
    """
    places = np.arange(batch_size, dtype=np.int64) if rows is None else rows
    epochs, places = np.divmod(step * batch_size + places, num_samples)
    if not shuffle:
        return places
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = _permute(places[chosen], num_samples, seed, int(epoch))
    return ids


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit numbers (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _permute(
    places: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the epoch's permutation at these positions."""
    if num_samples <= TABLE_SAMPLES:
        return _table(num_samples, seed, epoch)[places]
    keys = _keys(seed, epoch, ROUNDS)
    ids = _encrypt(places.astype(np.uint64), keys, num_samples)
    # The network permutes the next power of two; values beyond num_samples go through it again
    # until they are below.
    while (outside := ids >= num_samples).any():
        ids[outside] = _encrypt(ids[outside], keys, num_samples)
    return ids.astype(np.int64)


@lru_cache(maxsize=4)
def _table(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    scattered = mix(mix(np.arange(num_samples, dtype=np.uint64)) + _keys(seed, epoch, 1))
    return np.argsort(scattered, kind="stable")


def _keys(seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    keys = np.random.SeedSequence((seed, epoch)).generate_state(count, np.uint64)
    return keys.astype(np.uint64)


def _encrypt(
    values: NDArray[np.uint64], keys: NDArray[np.uint64], num_samples: int
) -> NDArray[np.uint64]:
    bits = max((num_samples - 1).bit_length(), 2)
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    # Each half is changed by a function of the other. That can be undone, so it is a permutation.
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (mix(high + key) & low_mask)
        else:
            high = high ^ (mix(low + key) & high_mask)
    return (high << low_bits) | low
