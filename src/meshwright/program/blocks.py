"""Finding the repeated blocks of a model in its traced program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.program.jaxprs import Equation, name_stack
from meshwright.program.names import modules_of


@dataclass(frozen=True)
class BlockList:
    """A list of modules that run one after another.

    Attributes:
        path: the list's path, such as ``blocks``.
        ranges: for each element in order of execution, its equations as [start, stop).
    """

    path: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.ranges)

    def block_path(self, index: int) -> str:
        """Return the path of one block."""
        return f"{self.path}.{index}"


def find_block_lists(eqns: Sequence[Equation]) -> list[BlockList]:
    """Find the outermost lists of modules whose elements run one after another, in order."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for number, eqn in enumerate(eqns):
        for key in _elements(name_stack(eqn)):
            start, _ = spans.get(key, (number, number))
            spans[key] = (start, number + 1)
    by_list: dict[str, dict[int, tuple[int, int]]] = {}
    for (path, index), span in spans.items():
        by_list.setdefault(path, {})[index] = span
    lists = [
        BlockList(path, tuple(elements[i] for i in range(len(elements))))
        for path, elements in by_list.items()
        if len(elements) > 1 and sorted(elements) == list(range(len(elements)))
    ]
    ordered = [found for found in lists if _one_after_another(found.ranges)]
    return _apart(sorted(_outermost(ordered), key=lambda found: found.ranges[0]))


def _elements(stack: str) -> list[tuple[str, int]]:
    """Return (list path, index) for every list element whose module the scopes name.

    Of one list only the outermost element counts: a module that several blocks share goes by the
    path it has in the first of them.
    """
    found: dict[str, int] = {}
    for path in modules_of(stack):
        parts = path.split(".")
        for position, part in enumerate(parts):
            if part.isdecimal() and position:
                found.setdefault(".".join(parts[:position]), int(part))
    return list(found.items())


def _one_after_another(ranges: Sequence[tuple[int, int]]) -> bool:
    return all(a[1] <= b[0] for a, b in pairwise(ranges))


def _outermost(lists: Sequence[BlockList]) -> list[BlockList]:
    def inside(inner: BlockList, outer: BlockList) -> bool:
        return inner is not outer and any(
            start <= inner.ranges[0][0] and inner.ranges[-1][1] <= stop
            for start, stop in outer.ranges
        )

    return [found for found in lists if not any(inside(found, other) for other in lists)]


def _apart(lists: Sequence[BlockList]) -> list[BlockList]:
    """Keep the first of lists that take turns, whose blocks then hold the others' as well."""
    kept: list[BlockList] = []
    for found in lists:
        if not kept or kept[-1].ranges[-1][1] <= found.ranges[0][0]:
            kept.append(found)
    return kept
