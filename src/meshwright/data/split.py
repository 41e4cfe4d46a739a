"""Splitting a source into samples to train on and samples held out for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.order import mix
from meshwright.data.protocols import HostBatch, Source

Part = Literal["train", "held-out"]


@dataclass(frozen=True)
class SplitSource:
    """Either the held-out samples of a source, or all others.

    Of every ``every`` consecutive samples one is held out, at a pseudorandom position, so that
    sorted and cyclic data are divided evenly. The split depends on nothing but the numbers of the
    samples, so it is the same in every run.

    Attributes:
        source: the samples.
        every: one sample in this many is held out.
        part: which of the two parts this is.
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
