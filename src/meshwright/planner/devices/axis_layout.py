"""How mesh axes lie on a machine: on which nodes, and on which links of a torus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.hardware import Chip
from meshwright.mesh.build import split_across

_TORUS_DIMS = {"torus_2d": 2, "torus_3d": 3}


@dataclass(frozen=True)
class InsideLinks:
    """What the devices of an axis have of the fast links inside a node.

    Attributes:
        links: links of a device that a collective over the axis uses at once.
        pair: links between two neighbours on the axis.
        steps: messages that follow each other when every device receives from all others.
        hops: links that a message between two devices crosses, on average.
    """

    links: int
    pair: int
    steps: int
    hops: float = 1.0


def split_over_nodes(sizes: Sequence[int], nodes: int) -> list[tuple[int, int]]:
    """Return, for each axis from the outermost, its devices in one node and the nodes it spans.

    As `meshwright.mesh.build` places them: outer axes cross nodes first. Where nodes do not divide
    the axes, devices are numbered in order, and the group that spans most nodes counts.
    """
    across = split_across(sizes, nodes)
    if across is not None and across[-1:] == [1]:
        return [(size // outer, outer) for size, outer in zip(sizes, across, strict=True)]
    count = math.prod(sizes)
    node = (np.arange(count) // max(count // nodes, 1)).reshape(tuple(sizes))
    spans: list[tuple[int, int]] = []
    for axis, size in enumerate(sizes):
        groups = np.sort(np.moveaxis(node, axis, -1).reshape(-1, size), axis=1)
        spanned = int((np.diff(groups, axis=1) > 0).sum(axis=1).max(initial=0)) + 1
        spans.append((max(size // spanned, 1), spanned))
    return spans


def inside_links(sizes: Sequence[int], chip: Chip) -> list[InsideLinks]:
    """Return what each axis has of the links inside a node, where it has these sizes."""
    if chip.topology in _TORUS_DIMS:
        return _on_torus(sizes, chip)
    if chip.topology == "point_to_point":
        peers = max((chip.fast_domain_chips or 2) - 1, 1)
        per_pair = max(chip.links_per_chip // peers, 1)
        return [
            InsideLinks(min(chip.links_per_chip, max(size - 1, 1) * per_pair), per_pair, size - 1)
            for size in sizes
        ]
    return [InsideLinks(chip.links_per_chip, chip.links_per_chip, size - 1) for size in sizes]


def torus_shape(chips: int, dims: int) -> list[int]:
    """Return the shape of a torus of so many chips, as close to a cube as their number allows."""
    shape, left, factor = [1] * dims, chips, 2
    factors: list[int] = []
    while left > 1:
        if factor * factor > left:
            factor = left
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    for prime in sorted(factors, reverse=True):
        shape.sort()
        shape[0] *= prime
    return sorted(shape)


def _on_torus(sizes: Sequence[int], chip: Chip) -> list[InsideLinks]:
    """Give the dims of the torus to the axes, the innermost first.

    An axis that has a whole dim with wraparound sends in both directions; on a part of a dim, or
    without wraparound, its ends have one link only.
    """
    dims = _TORUS_DIMS[chip.topology]
    devices, on_chip = math.prod(sizes), chip.devices_per_chip
    full = torus_shape(max(devices // on_chip, 1), dims)
    free, found = list(full), list[InsideLinks]()
    for size in reversed(sizes):
        shared = math.gcd(size, on_chip)
        on_chip //= shared
        needed, links, steps, hops = size // shared, 0, shared - 1, 0.0
        for dim in _by_fit(free, needed):
            taken = math.gcd(needed, free[dim])
            if taken == 1:
                continue
            wraps = taken == full[dim] and _wraps(taken, chip)
            links += 2 if wraps else 1
            steps += taken // 2 if wraps else taken - 1
            hops += taken / (4 if wraps else 3)
            free[dim] //= taken
            needed //= taken
        # Two devices of one chip are joined at least as well as chips are.
        pair = chip.links_per_chip if links == 0 and shared > 1 else 1
        found.append(InsideLinks(max(links, pair), pair, steps, max(hops, 1.0)))
    return found[::-1]


def _by_fit(free: Sequence[int], size: int) -> list[int]:
    """Order dims: those of just this size first, then the longest."""
    return sorted(range(len(free)), key=lambda dim: (free[dim] != size, -free[dim]))


def _wraps(length: int, chip: Chip) -> bool:
    """Whether a dim of a slice has wraparound links: full dims in 2D, whole cubes of 4 in 3D."""
    if chip.topology == "torus_2d":
        return length == math.isqrt(chip.fast_domain_chips or 0)
    return length % 4 == 0
