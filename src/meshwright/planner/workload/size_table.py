"""The sizes of all arrays of a program on one device, found together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from meshwright.planner.workload.array_operations import Array

Use = Literal["gradients", "gathered", "activations", "working"]
USES: tuple[Use, ...] = ("gradients", "gathered", "activations", "working")
Form = Literal["stored", "copied", "rearranged"]
"""An array that a kernel writes, a copy of an input, or an operand copied for a product."""


class Sizes(Protocol):
    """How large arrays are on one device."""

    def of(self, array: Array) -> float:
        """Return the bytes of an array."""
        ...

    def of_copy(self, array: Array) -> float:
        """Return the bytes of a copied input: a gathered weight or a row of a loop."""
        ...

    def of_rearranged(self, array: Array) -> float:
        """Return the bytes of a product's operand that is copied first."""
        ...

    def use(self, array: Array, *, crosses: bool) -> Use:
        """Return what an array is used for; ``crosses`` if it lives through both passes."""
        ...


class SizeTable:
    """Arrays grouped by what decides which part of them a device has.

    Args:
        arrays: the arrays.
        forms: whether each is the array itself, or a copy; the arrays themselves by default.
    """

    def __init__(self, arrays: Sequence[Array], forms: Sequence[Form] | None = None) -> None:
        self._whole = np.array([array.nbytes for array in arrays], float)
        stored: list[Form] = ["stored"] * len(arrays)
        groups: dict[tuple[object, ...], int] = {}
        self._first: list[tuple[Array, Form, int]] = []
        self._group = np.zeros(len(arrays), int)
        for number, (array, form) in enumerate(zip(arrays, forms or stored, strict=True)):
            group = groups.setdefault(_alike(array, form), len(groups))
            self._group[number] = group
            if group == len(self._first):
                self._first.append((array, form, array.nbytes))

    def shares(self, sizes: Sizes) -> np.ndarray:
        """Return the part of each array that a device has."""
        found = [_share(array, form, whole, sizes) for array, form, whole in self._first]
        return np.array(found, float)[self._group]

    def nbytes(self, sizes: Sizes) -> np.ndarray:
        """Return the bytes of each array on a device."""
        return self._whole * self.shares(sizes)


def _alike(array: Array, form: Form) -> tuple[object, ...]:
    """Return what arrays have in common of which a device has the same part."""
    known = array.leaf, array.of_row, array.gradient, array.cast_of
    return form, array.classes, *known, array.nbytes > 0


def _share(array: Array, form: Form, whole: int, sizes: Sizes) -> float:
    """Return the part of an array of ``whole`` bytes that a device has."""
    if not whole:
        return 0.0
    if form == "copied":
        return sizes.of_copy(array) / whole
    if form == "rearranged":
        return sizes.of_rearranged(array) / whole
    return sizes.of(array) / whole
