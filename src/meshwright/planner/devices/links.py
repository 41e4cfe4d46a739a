"""Which links each mesh axis has, how axes lie on nodes and tori, and how long collectives take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.errors import UserError, did_you_mean
from meshwright.hardware import Chip, Hardware
from meshwright.mesh.axes import AXES, canonical_sizes, resolve_sizes, shown_sizes
from meshwright.mesh.build import split_across


@dataclass(frozen=True)
class AxisLink:
    """How the devices of a mesh axis are connected.

    ``inside`` is its devices in one node, ``nodes`` how many it spans. Bandwidths are what a device
    can send in one direction and what collectives reach, 1e9 bytes/s: over the slowest link that
    the axis uses, to devices of its node, and to its neighbour on the axis. The latency is that of
    the slowest link. Inside a node, ``steps`` messages follow each other when each receives from
    all others, and a message crosses ``hops`` links on average.
    """

    axis: str
    size: int
    inside: int
    nodes: int
    gb_per_s: float
    latency_s: float
    inside_gb_per_s: float
    pair_gb_per_s: float
    steps: int
    hops: float = 1.0


def axis_links(hardware: Hardware, mesh: Mapping[str, int]) -> dict[str, AxisLink]:
    """Return how each axis of a mesh is connected; axes of size 1 are left out.

    Inner axes (tensor, then fsdp) are inside a node first, as `meshwright.build_mesh` places them.
    """
    given = dict.fromkeys(AXES, 1) | canonical_sizes(mesh)
    sizes = shown_sizes(resolve_sizes(given, hardware.count))
    spans = split_over_nodes(list(sizes.values()), hardware.nodes)
    inside = inside_links([devices for devices, _ in spans], hardware.chip)
    return {
        axis: _axis_link(axis, size, span, links, hardware.chip)
        for (axis, size), span, links in zip(sizes.items(), spans, inside, strict=True)
    }


def collective_seconds(kind: str, nbytes: float, link: AxisLink, hardware: Hardware) -> float:
    """Return the time of one collective over an axis.

    ``nbytes`` is the size of the whole value: an all-gather's output, a reduce-scatter's input,
    what one device sends in an all-to-all or a permute.
    """
    if kind not in _SECONDS:
        raise UserError(
            f"unknown collective `{kind}`",
            why=f"known are {', '.join(_SECONDS)}",
            fix=did_you_mean(kind, _SECONDS),
        )
    return _SECONDS[kind](nbytes, link, hardware.chip) if link.size > 1 else 0.0


def _axis_link(
    axis: str, size: int, span: tuple[int, int], links: InsideLinks, chip: Chip
) -> AxisLink:
    inside, nodes = span
    per_link = chip.link_gb_per_s * chip.link_share / chip.devices_per_chip
    own = links.links * per_link
    network = _network(chip) if nodes > 1 else math.inf
    return AxisLink(
        axis=axis,
        size=size,
        inside=inside,
        nodes=nodes,
        gb_per_s=min(network, own) if inside > 1 else network,
        latency_s=(chip.inter_node_latency_us if nodes > 1 else chip.intra_node_latency_us) * 1e-6,
        inside_gb_per_s=own,
        pair_gb_per_s=min(links.pair * per_link, network) if inside > 1 else network,
        steps=links.steps,
        hops=links.hops,
    )


def check_network(hardware: Hardware) -> None:
    """Raise if devices are in several nodes, and it is not known how fast the network is."""
    if hardware.nodes > 1:
        _network(hardware.chip)


def _network(chip: Chip) -> float:
    if chip.inter_node_gb_per_s is None:
        raise UserError(
            f"the network between nodes of {chip.name} is not known",
            why=f"chips.{chip.name} has no inter_node_gb_per_s",
            fix=f"write inter_node_gb_per_s for chips.{chip.name} in your hardware file, or plan "
            "for one node",
        )
    return chip.inter_node_gb_per_s * chip.link_share / chip.devices_per_chip


def _gather(nbytes: float, link: AxisLink, chip: Chip) -> float:
    """Return the time in which every device receives what all others have; a scatter is the same.

    Either in two stages, across nodes and then inside them, where each device sends its own part
    over the network; or in rings through all devices, which cross each node boundary as often as a
    node has devices.
    """
    n, k, m = link.size, link.inside, link.nodes
    inner, outer = chip.intra_node_latency_us * 1e-6, link.latency_s
    inside, network = link.inside_gb_per_s * 1e9, link.gb_per_s * 1e9
    stages = (k - 1) / k * nbytes / inside + link.steps * inner if k > 1 else 0.0
    if m == 1:
        return stages
    stages += (m - 1) / m * nbytes / k / network + (m - 1) * outer
    rings = (n - 1) / n * nbytes / _through(link) + (m - 1) * outer + (n - m) * inner
    return min(stages, rings)


def _all_reduce(nbytes: float, link: AxisLink, chip: Chip) -> float:
    """Return the time of a reduce-scatter and an all-gather, or of two trees if they are faster.

    Trees send a little more, in fewer steps. Neighbours on a torus make no trees.
    """
    ring = 2 * _gather(nbytes, link, chip)
    if chip.topology.startswith("torus"):
        return ring
    inner, outer = chip.intra_node_latency_us * 1e-6, link.latency_s
    depth = _log2(link.inside) * inner + (_log2(link.nodes) * outer if link.nodes > 1 else 0.0)
    return min(ring, 2 * (nbytes / _through(link) + depth))


def _all_to_all(nbytes: float, link: AxisLink, chip: Chip) -> float:
    """Return the time of sending a part to each device; the network works while fast links do."""
    n, k = link.size, link.inside
    inside = (k - 1) / n * nbytes * link.hops / (link.inside_gb_per_s * 1e9)
    inside += _log2(k) * chip.intra_node_latency_us * 1e-6
    if link.nodes == 1:
        return inside
    return max(inside, (n - k) / n * nbytes / (link.gb_per_s * 1e9) + _log2(n) * link.latency_s)


def _permute(nbytes: float, link: AxisLink, _: Chip) -> float:
    return nbytes / (link.pair_gb_per_s * 1e9) + link.latency_s


def _through(link: AxisLink) -> float:
    """Return what passes through all devices at once, bytes/s: a node has a port per device."""
    if link.nodes == 1:
        return link.inside_gb_per_s * 1e9
    ports = link.inside * link.gb_per_s * 1e9
    return min(ports, link.inside_gb_per_s * 1e9) if link.inside > 1 else ports


def _log2(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


_SECONDS: Mapping[str, Callable[[float, AxisLink, Chip], float]] = {
    "all-reduce": _all_reduce,
    "all-gather": _gather,
    "reduce-scatter": _gather,
    "all-to-all": _all_to_all,
    "ragged-all-to-all": _all_to_all,
    "collective-permute": _permute,
    "collective-broadcast": _gather,
    "point-to-point": _permute,
}


_TORUS_DIMS = {"torus_2d": 2, "torus_3d": 3}


@dataclass(frozen=True)
class InsideLinks:
    """What the devices of an axis have of the fast links inside a node.

    ``links`` of a device are used at once by a collective over the axis, ``pair`` of them join two
    neighbours on it; ``steps`` and ``hops`` are those of `AxisLink`.
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
    devices, on_chip = math.prod(sizes), chip.devices_per_chip
    full = torus_shape(max(devices // on_chip, 1), _TORUS_DIMS[chip.topology])
    free, found = list(full), list[InsideLinks]()
    for size in reversed(sizes):
        shared = math.gcd(size, on_chip)
        on_chip //= shared
        needed, links, steps, hops = size // shared, 0, shared - 1, 0.0
        # Dims of just this size first, then the longest.
        for dim in sorted(range(len(free)), key=lambda d: (free[d] != needed, -free[d])):
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


def _wraps(length: int, chip: Chip) -> bool:
    """Whether a dim of a slice has wraparound links: full dims in 2D, whole cubes of 4 in 3D."""
    if chip.topology == "torus_2d":
        return length == math.isqrt(chip.fast_domain_chips or 0)
    return length % 4 == 0
