"""Which devices take part in a collective, and which mesh axes they span."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]
PerDevice = np.ndarray[Any, np.dtype[Any]]
"""A value on every device: the first dim is the device, or 1 where all devices agree."""

IRREGULAR = ("?",)
"""The axes of a collective whose groups of devices are not a product of mesh axes."""


@lru_cache(maxsize=4096)
def parse_replica_groups(text: str, num_devices: int) -> Groups:
    """Read groups of device ids in any of XLA's three notations; empty means all devices.

    Explicit ``{{0,1},{2,3}}``; iota ``[2,4]<=[4,2]T(1,0)``; named
    ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b','a':(1)2}``.
    """
    text = text.strip()
    if text in ("", "{}"):
        return (tuple(range(num_devices)),)
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("{"):
        return tuple(integers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
    shape, _, iota = text.partition("<=")
    return _groups(_iota(iota).reshape(integers(shape)))


def _mesh_groups(text: str) -> Groups:
    """Read groups along axes of a mesh named by XLA; ``'a':(p)s`` is part of an axis."""
    declared = re.search(r"mesh\[([^\]]*)\]", text)
    chosen = re.search(r"\{([^{}]*)\}\s*$", text)
    assert declared, f"unknown replica groups: {text}"
    assert chosen, f"unknown replica groups: {text}"
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", declared[1])}
    refs = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", chosen[1])
    ]
    factors: list[tuple[str, int, int]] = []
    for name, full in sizes.items():
        parts = [(pre, size) for ref, pre, size in refs if ref == name]
        cuts = sorted({1, full, *(p for p, _ in parts), *(p * s for p, s in parts)})
        factors += [(name, pre, after // pre) for pre, after in pairwise(cuts)] or [(name, 1, 1)]
    ids = re.search(r"device_ids=\((.*)\)\s*\{", text)
    devices = _device_ids(ids[1]) if ids else np.arange(math.prod(sizes.values()))
    grid = devices.reshape([size for _, _, size in factors])
    last = [factors.index(ref) for ref in refs]
    order = [i for i in range(len(factors)) if i not in last] + last
    return _groups(grid.transpose(order).reshape(-1, math.prod(size for _, _, size in refs)))


def _device_ids(text: str) -> PerDevice:
    return _iota(text) if text.startswith("[") else np.array(integers(text))


def _iota(text: str) -> PerDevice:
    """Device ids 0, 1, … reshaped and transposed: ``[4,2]T(1,0)``."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    return (ids.transpose(integers(order)) if order else ids).reshape(-1)


def _groups(grid: PerDevice) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def integers(text: str) -> tuple[int, ...]:
    """Return the integers in a text, in order."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


@dataclass(frozen=True)
class MeshAxes:
    """The mesh: names and sizes, with device ids row-major."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of devices along these axes together."""
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def varying(self, values: PerDevice) -> tuple[str, ...]:
        """Return the axes along which per-device values differ."""
        grid = np.broadcast_to(values, self.num_devices).reshape(self.sizes)
        return tuple(
            name for i, name in enumerate(self.names) if (grid != grid.take([0], axis=i)).any()
        )

    def spanned(self, groups: Groups) -> tuple[str, ...]:
        """Return the axes the groups run over; IRREGULAR if they are not a product of axes."""
        if max(map(max, groups)) >= self.num_devices:
            return IRREGULAR
        ids = np.arange(self.num_devices).reshape(self.sizes)
        coordinates = np.array(np.unravel_index(np.array(groups[0]), self.sizes))
        axes = [i for i, row in enumerate(coordinates) if len(set(row.tolist())) > 1]
        others = [i for i in range(len(self.names)) if i not in axes]
        size = math.prod(self.sizes[i] for i in axes)
        expected = _groups(ids.transpose(others + axes).reshape(-1, size))
        same = {frozenset(group) for group in groups} == {frozenset(group) for group in expected}
        return tuple(self.names[i] for i in axes) if same else IRREGULAR

    def moved(self, pairs: Groups) -> tuple[str, ...]:
        """Return the axes along which (source, target) pairs of a permute move data."""
        source, target = np.array(pairs).T
        if max(source.max(), target.max()) >= self.num_devices:
            return IRREGULAR
        steps = zip(
            np.unravel_index(source, self.sizes), np.unravel_index(target, self.sizes), strict=True
        )
        moves = [bool((start != end).any()) for start, end in steps]
        return tuple(name for name, moved in zip(self.names, moves, strict=True) if moved)
