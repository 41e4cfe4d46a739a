"""A part of the samples held out for evaluation, chosen by their number alone."""

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
    """Either the held-out samples of a source or the others; together they are all of it.

    Of every ``every`` consecutive samples one is held out, at a place that looks random, so that
    sorted and cyclic data are divided evenly. Nothing is stored and no seed matters: a sample
    stays on its side whatever the run.

    Attributes:
        source: the samples.
        every: one of so many is held out.
        part: which side this is.
    """

    source: Source
    every: int
    part: Part

    @property
    def tokenizer(self) -> Any:
        """The source's."""
        return getattr(self.source, "tokenizer", None)

    def __len__(self) -> int:
        held_out = len(self.source) // self.every
        return held_out if self.part == "held-out" else len(self.source) - held_out

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers within this part."""
        return self.source.rows(self.source_ids(ids))

    def source_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers the source knows these samples by."""
        if self.part == "held-out":
            return ids * self.every + self._held_out_place(ids)
        group, place = np.divmod(ids, self.every - 1)
        # What is left after the last whole group is all trained on.
        last = len(self.source) // self.every
        rest = group >= last
        after = (place >= self._held_out_place(group)) & ~rest
        return np.where(rest, ids + last, group * self.every + place + after)

    def fingerprint(self) -> str:
        """Return what depends on the source and the division."""
        own = getattr(self.source, "fingerprint", None)
        return fingerprint_of(own() if own else len(self.source), self.every, self.part)

    def describe(self) -> str:
        """Say what part of the source it is."""
        own = getattr(self.source, "describe", None)
        line = own() if own else type(self.source).__name__
        kept = "held out" if self.part == "held-out" else "without those held out"
        return f"{line}; {len(self):,} samples {kept}"

    def _held_out_place(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        scattered = mix(groups.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        return (scattered % np.uint64(self.every)).astype(np.int64)


def split_source(source: Source, fraction: float) -> tuple[Source, Source | None]:
    """Return the samples to train on and about ``fraction`` of all, at least one, held out."""
    if fraction <= 0 or len(source) < 2:
        return source, None
    every = min(max(round(1 / fraction), 2), len(source))
    return SplitSource(source, every, "train"), SplitSource(source, every, "held-out")
