"""Runs of equal blocks in a list, of one kind or with several kinds alternating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.blocks.differences import first_difference
from meshwright.program.jaxpr.equations import Equation, Jaxpr


def repeating_parts(
    jaxpr: Jaxpr, blocks: BlockList, same_leaves: Callable[[str, str], bool]
) -> Iterator[BlockList]:
    """Yield the parts of a list in which blocks repeat, the longest first."""
    paths = [blocks.block_path(n) for n in range(blocks.num_blocks)]
    kinds = _kinds(
        [jaxpr.eqns[start:stop] for start, stop in blocks.ranges],
        lambda one, other: same_leaves(paths[one], paths[other]),
    )
    # Two blocks in a row, with the parent's equations between them.
    pairs = _kinds([jaxpr.eqns[a[0] : b[1]] for a, b in pairwise(blocks.ranges)])
    periods = range(1, len(kinds) // 2 + 1)
    runs = [(period, *longest_run(kinds, pairs, period)) for period in periods]
    # If the parent's equations after each block count as part of it, the last block lacks them.
    runs += [(period, first, count - period) for period, first, count in runs]
    for period, first, count in sorted(runs, key=lambda run: (-run[2], run[0])):
        part = blocks.part(first, count).grouped(period)
        if part.num_blocks > 1 and part.has_unique_patterns:
            yield part


def _kinds(
    blocks: Sequence[Sequence[Equation]], same: Callable[[int, int], bool] = lambda one, other: True
) -> list[int]:
    """Return, for each block, the number of the first block that is equal to it."""
    kinds: list[int] = []
    for number, eqns in enumerate(blocks):
        equal = (
            kind
            for kind in dict.fromkeys(kinds)
            if len(blocks[kind]) == len(eqns)
            and same(kind, number)
            and not first_difference(blocks[kind], eqns)
        )
        kinds.append(next(equal, number))
    return kinds


def longest_run(kinds: Sequence[int], pairs: Sequence[int], period: int) -> tuple[int, int]:
    """Return the first block and the length of the longest run that repeats with a period.

    Args:
        kinds: the kind of each block.
        pairs: the kind of each pair of consecutive blocks.
        period: how many consecutive blocks are repeated; runs are whole multiples of it.
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
