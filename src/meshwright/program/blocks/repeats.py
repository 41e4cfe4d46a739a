"""Runs of blocks: which of a list's modules do the same, one after another or by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.blocks.differences import Unit, unlike
from meshwright.program.jaxpr.equations import Jaxpr


def repeating_parts(
    jaxpr: Jaxpr, blocks: BlockList, same_leaves: Callable[[str, str], bool]
) -> Iterator[BlockList]:
    """Return parts of a list of blocks that repeat, the longest first."""
    paths = [blocks.block_path(n) for n in range(blocks.num_blocks)]
    kinds = _kinds(
        [jaxpr.eqns[start:stop] for start, stop in blocks.ranges],
        lambda one, other: same_leaves(paths[one], paths[other]),
    )
    # A block with the one before it, and what the parent does between them.
    pairs = _kinds([jaxpr.eqns[a[0] : b[1]] for a, b in pairwise(blocks.ranges)])
    periods = range(1, len(kinds) // 2 + 1)
    runs = [(period, *longest_run(kinds, pairs, period)) for period in periods]
    # What the parent does after each block but the last belongs to blocks that then are one fewer.
    runs += [(period, first, count - period) for period, first, count in runs]
    for period, first, count in sorted(runs, key=lambda run: (-run[2], run[0])):
        part = blocks.part(first, count).grouped(period)
        if part.num_blocks > 1 and part.has_names:
            yield part


def _kinds(
    units: Sequence[Unit], same: Callable[[int, int], bool] = lambda one, other: True
) -> list[int]:
    """Return, for each unit, the number of the first that does the same."""
    kinds: list[int] = []
    for number, unit in enumerate(units):
        alike = (
            kind
            for kind in dict.fromkeys(kinds)
            if len(units[kind]) == len(unit)
            and same(kind, number)
            and not unlike(units[kind], unit)
        )
        kinds.append(next(alike, number))
    return kinds


def longest_run(kinds: Sequence[int], pairs: Sequence[int], period: int) -> tuple[int, int]:
    """Return where the longest run begins that repeats after a period, and how long it is.

    Args:
        kinds: what each block is.
        pairs: what each block but the first is together with the one before it.
        period: how many blocks in a row are repeated; runs are whole multiples.
    """
    best, first = (0, 0), 0
    for last in range(len(kinds)):
        before = last - period
        if before >= first and kinds[last] != kinds[before]:
            first = before + 1
        elif before > first and pairs[last - 1] != pairs[before - 1]:
            first = before
        best = max(best, ((last - first + 1) // period * period, -first))
    return -best[1], best[0]
