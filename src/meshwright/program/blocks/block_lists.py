"""Finding the repeated blocks of a model in its traced program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.program.jaxpr.equations import Equation, aval_of, name_stack
from meshwright.program.jaxpr.names import modules_of

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class BlockList:
    """Modules with numbered names that run one after another.

    Attributes:
        pattern: their paths with ``*`` for the number: ``blocks.*``, ``layers.layer_*``.
        elements: their paths in order of execution.
        ranges: for each block its equations as [start, stop).
        period: how many elements in a row are one block.
    """

    pattern: str
    elements: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    period: int = 1

    @property
    def path(self) -> str:
        """The list's own path, such as ``blocks``; the pattern where it is no list of its own."""
        return self.pattern.removesuffix(".*")

    @property
    def is_list(self) -> bool:
        """Whether it is a list, rather than attributes or keys whose names end in numbers."""
        return self.pattern.endswith(".*")

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.ranges)

    def block_path(self, index: int) -> str:
        """Return the path of one block: that of its first element."""
        return self.elements[index * self.period]

    def patterns(self) -> list[tuple[str, str]]:
        """Return, for each element of the first block, its path and that of all its like."""
        rows = (self.elements[n :: self.period] for n in range(self.period))
        return [(row[0], pattern_of(row)) for row in rows]

    @property
    def has_names(self) -> bool:
        """Whether stacks of the elements of a block can be told apart by their patterns."""
        return len({pattern for _, pattern in self.patterns()}) == self.period

    def part(self, first: int, count: int) -> BlockList:
        """Return so many of the blocks, from one of them on."""
        chosen, step = slice(first, first + count), self.period
        elements = self.elements[first * step : (first + count) * step]
        return replace(self, elements=elements, ranges=self.ranges[chosen])

    def grouped(self, period: int) -> BlockList:
        """Return the list in which so many blocks in a row are one."""
        firsts, lasts = self.ranges[::period], self.ranges[period - 1 :: period]
        ranges = tuple((a[0], b[1]) for a, b in zip(firsts, lasts, strict=True))
        return replace(self, ranges=ranges, period=self.period * period)


def pattern_of(paths: Sequence[str]) -> str:
    """Return one path for many that differ in their numbers.

    ``blocks.0.up`` and ``blocks.1.up`` are ``blocks.*.up``; every third one of a list, from its
    second on, is ``blocks.3n+1.up``.
    """
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(own[0] if len(set(own)) == 1 else _pattern(own) for own in parts)


def _pattern(parts: Sequence[str]) -> str:
    matches = [_NUMBERED.fullmatch(part) for part in parts]
    names = {match[1] for match in matches if match}
    if not all(matches) or len(names) > 1:
        return "*"
    numbers = sorted({int(match[2]) for match in matches if match})
    steps = {b - a for a, b in pairwise(numbers)}
    step = steps.pop() if len(steps) == 1 else 1
    if step == 1:
        return names.pop() + "*"
    return f"{names.pop()}{step}n" + (f"+{numbers[0] % step}" if numbers[0] % step else "")


def find_block_lists(eqns: Sequence[Equation]) -> list[BlockList]:
    """Find the outermost lists of modules whose elements run one after another."""
    ordered = [
        found
        for found in _candidates(eqns)
        if found.num_blocks > 1 and _one_after_another(found.ranges)
    ]
    lists = [found for found in ordered if found.is_list]
    # Names that end in numbers are a weaker sign than a list: a model has norm1 and norm2 as well.
    named = _outermost([f for f in ordered if not f.is_list and _alike(eqns, f)])
    for found in sorted(named, key=lambda found: -found.num_blocks):
        if all(_leaves_alone(found, other) for other in lists):
            lists.append(found)
    return _apart(sorted(_outermost(lists), key=lambda found: found.ranges[0]))


def why_no_list(eqns: Sequence[Equation]) -> str | None:
    """Say why the longest list of modules in a program without repeated blocks is none."""
    candidates = [f for f in _candidates(eqns) if f.is_list or f.num_blocks > 1]
    if not candidates:
        return None
    longest = max(candidates, key=lambda found: (found.num_blocks, found.is_list))
    if longest.num_blocks == 1:
        only = longest.elements[0]
        return f"of `{longest.path}` only `{only}` runs: others are the same module, or not called"
    for index, (a, b) in enumerate(pairwise(longest.ranges)):
        if a[1] > b[0]:
            first, second = longest.elements[index : index + 2]
            return f"`{first}` of `{longest.path}` runs again after `{second}` has begun"
    return f"the modules `{longest.path}` run different operations"


def _candidates(eqns: Sequence[Equation]) -> list[BlockList]:
    """Return all modules with numbered names, in the order in which they start."""
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    for number, eqn in enumerate(eqns):
        for pattern, element in _elements(name_stack(eqn)).items():
            own = spans.setdefault(pattern, {})
            start, _ = own.get(element, (number, number))
            own[element] = (start, number + 1)
    return [
        BlockList(pattern, tuple(elements), tuple(elements.values()))
        for pattern, elements in spans.items()
    ]


def _elements(stack: str) -> dict[str, str]:
    """Return, by pattern, the path of every numbered module that the scopes name.

    Of one list only the outermost element counts: a module that several blocks share goes by the
    path it has in the first of them.
    """
    found: dict[str, str] = {}
    for path in modules_of(stack):
        parts = path.split(".")
        for position, part in enumerate(parts):
            numbered = _NUMBERED.fullmatch(part)
            if numbered and (position or numbered[1]):
                pattern = ".".join([*parts[:position], numbered[1] + "*"])
                found.setdefault(pattern, ".".join(parts[: position + 1]))
    return found


def _one_after_another(ranges: Sequence[tuple[int, int]]) -> bool:
    return all(a[1] <= b[0] for a, b in pairwise(ranges))


def _alike(eqns: Sequence[Equation], found: BlockList) -> bool:
    """Whether all elements run the same operations on the same shapes."""
    kinds = {
        tuple((e.primitive, *(aval_of(v).shape for v in e.outvars)) for e in eqns[start:stop])
        for start, stop in found.ranges
    }
    return len(kinds) == 1


def _inside(inner: BlockList, outer: BlockList) -> bool:
    return inner is not outer and any(
        start <= inner.ranges[0][0] and inner.ranges[-1][1] <= stop for start, stop in outer.ranges
    )


def _leaves_alone(found: BlockList, other: BlockList) -> bool:
    """Whether numbered names take nothing from a list: it is elsewhere, or shorter and inside."""
    if _inside(other, found):
        return found.num_blocks > other.num_blocks
    apart = found.ranges[-1][1] <= other.ranges[0][0] or other.ranges[-1][1] <= found.ranges[0][0]
    return apart or _inside(found, other)


def _outermost(lists: Sequence[BlockList]) -> list[BlockList]:
    return [found for found in lists if not any(_inside(found, other) for other in lists)]


def _apart(lists: Sequence[BlockList]) -> list[BlockList]:
    """Keep the first of lists that take turns, whose blocks then hold the others' as well."""
    kept: list[BlockList] = []
    for found in lists:
        if not kept or kept[-1].ranges[-1][1] <= found.ranges[0][0]:
            kept.append(found)
    return kept
