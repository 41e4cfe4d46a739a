"""How large the arrays of a program are on one device of a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meshwright.planner.workload.array_operations import Array

Use = Literal["gradients", "gathered", "activations", "working"]
USES: tuple[Use, ...] = ("gradients", "gathered", "activations", "working")


@dataclass(frozen=True)
class LeafShares:
    """Which part of a leaf a device has: gathered over fsdp, between steps, and of its gradient."""

    whole: float = 1.0
    at_rest: float = 1.0
    gradient: float = 1.0


WHOLE = LeafShares()


@dataclass(frozen=True)
class DeviceSizes:
    """The sizes of arrays on one device.

    ``rows`` are its samples, relative to those that were traced. By class, ``tensor`` has the
    number of parts and ``row_limit`` the most rows of what is computed in parts. Loops that run
    more than once copy the rows that they read; with ``reduced_last``, gradients stay whole until
    all of them exist.
    """

    rows: float
    batch: frozenset[int]
    tensor: Mapping[int, int] = field(default_factory=dict[int, int])
    leaves: Mapping[int, LeafShares] = field(default_factory=dict[int, LeafShares])
    row_limit: Mapping[int, float] = field(default_factory=dict[int, float])
    loops: bool = True
    reduced_last: bool = False
    _known: dict[Array, float] = field(default_factory=dict[Array, float])

    def of(self, array: Array) -> float:
        """Return the bytes of an array."""
        known = self._known.get(array)
        if known is None:
            known = self._known[array] = array.nbytes * self._share(array)
        return known

    def of_copy(self, array: Array) -> float:
        """Return the bytes of a copied input: a gathered weight or a row of a loop.

        For a gradient, those that it has more before it is reduced.
        """
        if array.gradient is not None:
            leaf = self.leaves.get(array.gradient, WHOLE)
            return 0.0 if self.reduced_last else array.nbytes * (leaf.whole - leaf.gradient)
        if array.leaf is None:
            return self.of(array) if self.loops else 0.0
        leaf = self.leaves.get(array.leaf, WHOLE)
        if leaf.whole == leaf.at_rest and not (array.of_row and self.loops):
            return 0.0
        return array.nbytes * leaf.whole

    def use(self, array: Array, *, crosses: bool) -> Use:
        """Return what an array is used for; ``crosses`` if it lives through both passes."""
        if array.gradient is not None:
            return "gradients"
        if array.of_weights or array.cast_of is not None:
            return "gathered"
        return "activations" if crosses else "working"

    def _share(self, array: Array) -> float:
        if array.gradient is not None:
            leaf = self.leaves.get(array.gradient, WHOLE)
            return leaf.whole if self.reduced_last else leaf.gradient
        if array.cast_of is not None:
            # The rule SHARDED_CASTS.
            return self.leaves.get(array.cast_of, WHOLE).at_rest
        classes = array.classes
        share = 1.0
        if classes & self.batch:
            limits = [self.row_limit[c] for c in classes if c in self.row_limit]
            share = min([self.rows, *limits])
        parts = [self.tensor[c] for c in classes if c in self.tensor]
        return share / max(parts, default=1)


class SizeTable:
    """Arrays, or copies of inputs, grouped by what decides which part of them a device has."""

    def __init__(self, arrays: Sequence[Array], copied: Sequence[bool] | None = None) -> None:
        self._whole = np.array([array.nbytes for array in arrays], float)
        groups: dict[tuple[object, ...], int] = {}
        self._first: list[tuple[Array, bool, int]] = []
        self._group = np.zeros(len(arrays), int)
        forms = zip(arrays, copied or [False] * len(arrays), strict=True)
        for number, (array, copy) in enumerate(forms):
            group = groups.setdefault(_alike(array, copy), len(groups))
            self._group[number] = group
            if group == len(self._first):
                self._first.append((array, copy, array.nbytes))

    def shares(self, sizes: DeviceSizes) -> np.ndarray:
        """Return the part of each array that a device has."""
        found = [_share(array, copy, whole, sizes) for array, copy, whole in self._first]
        return np.array(found, float)[self._group]

    def nbytes(self, sizes: DeviceSizes) -> np.ndarray:
        """Return the bytes of each array on a device."""
        return self._whole * self.shares(sizes)


def _alike(array: Array, copied: bool) -> tuple[object, ...]:
    """Return what arrays have in common of which a device has the same part."""
    known = array.leaf, array.of_row, array.gradient, array.cast_of
    return copied, array.classes, *known, array.nbytes > 0


def _share(array: Array, copied: bool, whole: int, sizes: DeviceSizes) -> float:
    """Return the part of an array of ``whole`` bytes that a device has."""
    if not whole:
        return 0.0
    return (sizes.of_copy(array) if copied else sizes.of(array)) / whole
