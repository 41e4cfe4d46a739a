"""How large the arrays of a program are on one device of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.workload.array_operations import Array
from meshwright.planner.workload.size_table import Use


@dataclass(frozen=True)
class LeafShares:
    """Which part of a leaf a device has.

    Attributes:
        whole: when it is gathered over fsdp.
        at_rest: between updates.
        gradient: of its reduced gradient.
    """

    whole: float = 1.0
    at_rest: float = 1.0
    gradient: float = 1.0


WHOLE = LeafShares()


@dataclass(frozen=True)
class DeviceSizes:
    """The sizes of arrays on one device.

    Attributes:
        rows: samples of the device, relative to those that the program was traced for.
        batch: the classes of samples.
        tensor: by class, into how many parts the tensor axis divides it.
        leaves: by number, which part of a weight the device has.
        transposes: whether products copy operands whose dims are in another order.
        row_limit: by class, rows at most of arrays with that class: what is computed in parts.
        loops: whether loops run more than once, and copy the rows that they read.
    """

    rows: float
    batch: frozenset[int]
    tensor: Mapping[int, int] = field(default_factory=dict[int, int])
    leaves: Mapping[int, LeafShares] = field(default_factory=dict[int, LeafShares])
    transposes: bool = False
    row_limit: Mapping[int, float] = field(default_factory=dict[int, float])
    loops: bool = True
    _known: dict[Array, float] = field(default_factory=dict[Array, float])

    def of(self, array: Array) -> float:
        """Return the bytes of an array."""
        known = self._known.get(array)
        if known is None:
            known = self._known[array] = array.nbytes * self._share(array)
        return known

    def of_copy(self, array: Array) -> float:
        """Return the bytes of a copied input: a gathered weight or a row of a loop."""
        if array.leaf is None:
            return self.of(array) if self.loops else 0.0
        leaf = self.leaves.get(array.leaf, WHOLE)
        if leaf.whole == leaf.at_rest and not (array.of_row and self.loops):
            return 0.0
        return array.nbytes * leaf.whole

    def of_rearranged(self, array: Array) -> float:
        """Return the bytes of a product's operand that is copied first."""
        return self.of(array) if self.transposes else 0.0

    def use(self, array: Array, *, crosses: bool) -> Use:
        """Return what an array is used for; ``crosses`` if it lives through both passes."""
        if array.gradient is not None:
            return "gradients"
        if array.of_weights or array.cast_of is not None:
            return "gathered"
        return "activations" if crosses else "working"

    def _share(self, array: Array) -> float:
        if array.gradient is not None:
            return self.leaves.get(array.gradient, WHOLE).gradient
        if array.cast_of is not None:
            return self.leaves.get(array.cast_of, WHOLE).at_rest
        classes = array.classes
        share = 1.0
        if classes & self.batch:
            limits = [self.row_limit[c] for c in classes if c in self.row_limit]
            share = min([self.rows, *limits])
        parts = [self.tensor[c] for c in classes if c in self.tensor]
        return share / max(parts, default=1)
