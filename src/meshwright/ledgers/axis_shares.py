"""How the bytes of a collective are divided among the axes it runs over, and kinds in families."""

from __future__ import annotations

from meshwright.compiled.collectives import Collective, ring_bytes


def shares(collective: Collective, mesh: dict[str, int]) -> dict[str, float]:
    """Return the bytes that a collective over several axes sends over each of them.

    A reduction over data × fsdp is a reduce-scatter over fsdp, an all-reduce of the pieces over
    data, and an all-gather over fsdp.
    """
    if len(collective.axes) == 1 or any(axis not in mesh for axis in collective.axes):
        return {collective.axes[0]: collective.sent_bytes}
    by_axis: dict[str, float] = {}
    payload = collective.payload_bytes * collective.count
    for axis in sorted(collective.axes, key=list(mesh).index, reverse=True):
        by_axis[axis] = ring_bytes(collective.kind, payload, mesh[axis])
        payload /= mesh[axis]
    return by_axis


def family(kind: str) -> str:
    """Return ``reduce`` for all-reduces and reduce-scatters, and other kinds as they are."""
    return "reduce" if kind in ("all-reduce", "reduce-scatter") else kind
