"""Mixtures: rows of several sources in fixed shares, each source in its own order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.indexed_data import SourceData
from meshwright.data.order import sample_ids
from meshwright.data.protocols import Data, HostBatch, Rows, Source
from meshwright.data.turns import Turns
from meshwright.errors import Setting, UserError

Weights = Mapping[str, float]


@dataclass(frozen=True)
class Mixture:
    """Sources to be mixed, as `mix` returns them."""

    sources: Mapping[str, Any]
    weights: Weights


def mix(sources: Mapping[str, Any], *, weights: Weights) -> Mixture:
    """Mix sources, so that after any number of rows each has given its share to within one row.

    Args:
        sources: the sources by name: `ChatData`, `TextData`, dicts of arrays, or others with a
            length and ``rows(ids)``.
        weights: the share of each; they are divided by their sum.
    """
    shares_of(weights, sources)
    return Mixture(dict(sources), dict(weights))


def shares_of(weights: Weights, sources: Mapping[str, Any]) -> tuple[Fraction, ...]:
    """Return the share of each source, exactly as the weights are written."""
    for name in {**weights, **sources}:
        if name not in sources or name not in weights:
            has, lacks = ("weights", "sources") if name in weights else ("sources", "weights")
            raise UserError(
                f"`{name}` is in {Setting(f'data.{has}')}, but not in {Setting(f'data.{lacks}')}",
                fix="give every source one weight; 0 leaves it out",
            )
    if any(not 0 <= weight < np.inf for weight in weights.values()) or not any(weights.values()):
        raise UserError(
            f"{Setting('data.weights')} are not weights",
            why=f"they are {', '.join(f'{name}: {weight}' for name, weight in weights.items())}",
            fix="write numbers of at least 0, and one above it, such as {chat: 0.7, text: 0.3}",
        )
    exact = [Fraction(str(weights[name])) for name in sources]
    return tuple(weight / sum(exact) for weight in exact)


@dataclass
class MixtureData(Data):
    """Batches of which every source gives its share.

    A row depends on the seed, its number and the weights alone. When a run resumes with other
    weights, its earlier rows count as they were.

    Attributes:
        weights: the share of each; they are divided by their sum.
        shuffle: whether each epoch of a source is shuffled anew.
        stages: the step from which on a run had some weights, for all runs so far.
    """

    sources: Mapping[str, Source]
    weights: Weights
    seed: int
    shuffle: bool = True
    stages: list[tuple[int, dict[str, float]]] = field(init=False)
    _assigned: Turns | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.stages = [(0, dict(self.weights))]

    @property
    def has_every_batch(self) -> bool:
        """True: sources are repeated."""
        return True

    @property
    def sequential(self) -> bool:
        """Whether a source is read by one thread at a time."""
        return any(getattr(source, "sequential", False) for source in self.sources.values())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the first source that has one."""
        found = (getattr(source, "tokenizer", None) for source in self.sources.values())
        return next((each for each in found if each is not None), None)

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the batch of one step, or these rows of it."""
        chosen, ids = self._chosen(step, batch_size, rows)
        batch = {
            name: np.empty((len(ids), *like.shape[1:]), like.dtype)
            for name, like in self._like.items()
        }
        for number, source in enumerate(self.sources.values()):
            own = chosen == number
            if own.any():
                for name, values in FilledSource(source, self._like).rows(ids[own]).items():
                    batch[name][own] = values
        return batch

    def counts(self, step: int, batch_size: int) -> dict[str, tuple[int, float]]:
        """Return the rows that each source gave before a step, and how many it should have."""
        turns = self._turns(batch_size)
        place = turns.at(step * batch_size)
        each = zip(self.sources, place.counts, place.owed, strict=True)
        return {name: (count, count + owed / turns.parts) for name, count, owed in each}

    def position(self, step: int) -> Any:
        """Return the weights of all steps so far, which say where each source is."""
        return {"stages": self.stages}

    def go_to(self, step: int, position: Any) -> None:
        """Continue after steps that may have had other weights."""
        stages = [(start, dict(own)) for start, own in position["stages"] if start < step]
        if not stages or stages[-1][1] != self.weights:
            stages.append((step, dict(self.weights)))
        self.stages = stages

    def fingerprint(self) -> str:
        """Return a fingerprint of the sources; weights may change."""
        parts = [
            (name, SourceData(source, self.seed, self.shuffle).fingerprint())
            for name, source in self.sources.items()
        ]
        return fingerprint_of("mixture", parts)

    def describe(self) -> str:
        """Return the share of each source, and what it is."""
        shares = zip(shares_of(self.weights, self.sources), self.sources.items(), strict=True)
        return "; ".join(
            f"{float(share):.3%} {name}: {SourceData(source, self.seed).describe()}"
            for share, (name, source) in shares
        )

    def _turns(self, batch_size: int) -> Turns:
        stages = [(at * batch_size, shares_of(own, self.sources)) for at, own in self.stages]
        if self._assigned is None or self._assigned.stages != tuple(stages):
            self._assigned = Turns(stages)
        return self._assigned

    def _chosen(self, step: int, batch_size: int, rows: Rows | None) -> tuple[Rows, Rows]:
        """Return the source of each row, and the number of its sample in the source."""
        chosen, places = self._turns(batch_size).rows(step * batch_size, batch_size)
        if rows is not None:
            chosen, places = chosen[rows], places[rows]
        ids = np.empty_like(places)
        for number, source in enumerate(self.sources.values()):
            own = chosen == number
            ids[own] = sample_ids(
                seed=self.seed, step=0, batch_size=1, num_samples=len(source), rows=places[own],
                shuffle=self.shuffle,
            )  # fmt: skip
        return chosen, ids

    @cached_property
    def _like(self) -> HostBatch:
        """One row of every array that some source has."""
        return common_form(self.sources)


@dataclass(frozen=True)
class FilledSource:
    """A source of a mixture with all arrays of the mixture, of which ``like`` is one row.

    Rows of tokens without them are learned whole, and are one document each.
    """

    source: Any
    like: HostBatch

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, ids: Rows) -> HostBatch:
        """Return the rows with these numbers."""
        batch = dict(self.source.rows(ids))
        for key in self.like.keys() - batch.keys():
            shape = (len(ids), *self.like[key].shape[1:])
            # The last token is only a target.
            value = np.minimum(np.arange(shape[1]), shape[1] - 2) if key == "positions" else 1
            batch[key] = np.broadcast_to(value, shape).astype(self.like[key].dtype)
        return batch


def common_form(sources: Mapping[str, Source]) -> HostBatch:
    """Return one row of every array that some source has; refuse sources that do not fit."""
    firsts = {name: dict(source.rows(np.zeros(1, np.int64))) for name, source in sources.items()}
    found = {key: like for batch in reversed(firsts.values()) for key, like in batch.items()}
    for name, batch in firsts.items():
        for key, like in found.items():
            if key not in batch and not (key in _FILLED and "tokens" in batch):
                raise UserError(
                    f"the source `{name}` has no `{key}`, which others of the mixture have",
                    why=f"it has {', '.join(batch)}",
                    fix="mix sources with the same arrays",
                )
            if key in batch and batch[key].shape != like.shape:
                raise UserError(
                    f"`{key}` of the source `{name}` has another shape than that of others",
                    why=f"a row is {batch[key].shape[1:]} instead of {like.shape[1:]}",
                    fix=f"give all sources the same {Setting('data.sequence_length')}",
                )
    return found


_FILLED = ("mask", "segment_ids", "positions")


@dataclass(frozen=True)
class PartsData(SourceData):
    """The sources of a mixture by name, to evaluate on each alone; the first stands for all."""

    members: Mapping[str, Data] = field(default_factory=dict[str, Data])

    @property
    def parts(self) -> Mapping[str, Data]:
        """The data of each source by name."""
        return self.members


def held_out_parts(sources: Mapping[str, Source | None], like: HostBatch, seed: int) -> Data | None:
    """Return sources to evaluate on, each for itself; None if there are none."""
    members = {
        name: SourceData(FilledSource(source, like), seed, shuffle=False)
        for name, source in sources.items()
        if source is not None and len(source)
    }
    if not members:
        return None
    return PartsData(next(iter(members.values())).source, seed, shuffle=False, members=members)
