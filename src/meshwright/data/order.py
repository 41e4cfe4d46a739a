"""The order of samples, a function of the seed and the step alone, and which are held out."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch, Source

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
    """Return the samples of one step, from 0: epoch after epoch, each shuffled anew or in order.

    The result does not depend on processes, devices or earlier calls, so any process can compute
    the rows it needs, and a resumed run sees the same samples as an uninterrupted one. An epoch has
    each of ``num_samples`` exactly once.
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


Part = Literal["train", "held-out"]


@dataclass(frozen=True)
class SplitSource:
    """Either the held-out samples of a source, or all others.

    Of every ``every`` consecutive samples one is held out, at a pseudorandom position, so that
    sorted and cyclic data are split evenly. The split depends on nothing but the numbers of the
    samples, so it is the same in every run.
    """

    source: Source
    every: int
    part: Part

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source."""
        return getattr(self.source, "tokenizer", None)

    def __len__(self) -> int:
        held_out = len(self.source) // self.every
        return held_out if self.part == "held-out" else len(self.source) - held_out

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers within this part."""
        return self.source.rows(self.source_ids(ids))

    def source_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of these samples in the source."""
        if self.part == "held-out":
            return ids * self.every + self._held_out_position(ids)
        group, position = np.divmod(ids, self.every - 1)
        # The samples after the last whole group are all trained on.
        last = len(self.source) // self.every
        rest = group >= last
        after = (position >= self._held_out_position(group)) & ~rest
        return np.where(rest, ids + last, group * self.every + position + after)

    def fingerprint(self) -> str:
        """Return a fingerprint of the source and the split."""
        own = getattr(self.source, "fingerprint", None)
        return fingerprint_of(own() if own else len(self.source), self.every, self.part)

    def describe(self) -> str:
        """Return the source's description and the size of this part."""
        own = getattr(self.source, "describe", None)
        line = own() if own else type(self.source).__name__
        which = "held out" if self.part == "held-out" else "without those held out"
        return f"{line}; {len(self):,} samples {which}"

    def _held_out_position(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        scattered = mix(groups.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        return (scattered % np.uint64(self.every)).astype(np.int64)


def split_source(source: Source, fraction: float) -> tuple[Source, Source | None]:
    """Return the samples to train on and about ``fraction`` of all, at least one, held out."""
    if fraction <= 0 or len(source) < 2:
        return source, None
    every = min(max(round(1 / fraction), 2), len(source))
    return SplitSource(source, every, "train"), SplitSource(source, every, "held-out")
