"""Finding lists of repeated blocks in a traced program, and cutting it there.

A block can be rematerialized; what is around blocks is evaluated as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.program.evaluate.dependencies import variables, variables_read
from meshwright.program.jaxpr.equations import Equation, Jaxpr, Var, aval_of, name_stack
from meshwright.program.jaxpr.names import modules_of

_NUMBERED = re.compile(r"(.*?)(\d+)")
_ELEMENT = re.compile(r"(.*?)(\d+(?:n(?:\+\d+)?)?)")
"""The name of one element of a list, or of every third one: ``3``, ``3n+1``."""
_EVERY_NTH = re.compile(r".*?\d+n(?:\+\d+)?")


@dataclass(frozen=True)
class BlockList:
    """Modules with numbered names that run one after another, ``period`` of them in a block.

    The ``pattern`` is their path with ``*`` for the number: ``blocks.*``, ``layers.layer_*``. The
    equations of each block are a range [start, stop).
    """

    pattern: str
    elements: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    period: int = 1

    @property
    def path(self) -> str:
        """The path of the list, such as ``blocks``; the pattern if it is not a list."""
        return self.pattern.removesuffix(".*")

    @property
    def is_list(self) -> bool:
        """Whether it is a list, and not attributes or keys whose names end in numbers."""
        return self.pattern.endswith(".*")

    @property
    def is_period(self) -> bool:
        """Whether these are the blocks of one iteration: ``blocks.2n`` and ``blocks.2n+1``."""
        return all(_EVERY_NTH.fullmatch(path.rpartition(".")[2]) for path in self.elements)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.ranges)

    def block_path(self, index: int) -> str:
        """Return the path of one block: that of its first element."""
        return self.elements[index * self.period]

    def patterns(self) -> list[tuple[str, str]]:
        """Return, for each element of the first block, its path and its pattern in all blocks."""
        paths = (self.elements[n :: self.period] for n in range(self.period))
        return [(same[0], pattern_of(same)) for same in paths]

    @property
    def has_unique_patterns(self) -> bool:
        """Whether each element of a block has another pattern, which can name its stack."""
        return len({pattern for _, pattern in self.patterns()}) == self.period

    def part(self, first: int, count: int) -> BlockList:
        """Return ``count`` of the blocks, starting at number ``first``."""
        stop = first + count
        elements = self.elements[first * self.period : stop * self.period]
        return replace(self, elements=elements, ranges=self.ranges[first:stop])

    def grouped(self, period: int) -> BlockList:
        """Return the list in which ``period`` consecutive blocks are one block."""
        firsts, lasts = self.ranges[::period], self.ranges[period - 1 :: period]
        ranges = tuple((a[0], b[1]) for a, b in zip(firsts, lasts, strict=True))
        return replace(self, ranges=ranges, period=self.period * period)


def pattern_of(paths: Sequence[str]) -> str:
    """Return one pattern for paths that differ in their numbers.

    ``blocks.0.up`` and ``blocks.1.up`` give ``blocks.*.up``; every third element of a list,
    starting at the second, gives ``blocks.3n+1.up``.
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(names[0] if len(set(names)) == 1 else _name_pattern(names) for names in columns)


def _name_pattern(numbered_names: Sequence[str]) -> str:
    matches = [_NUMBERED.fullmatch(name) for name in numbered_names]
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
    sequential = [
        candidate
        for candidate in _candidates(eqns)
        if candidate.num_blocks > 1 and all(a[1] <= b[0] for a, b in pairwise(candidate.ranges))
    ]
    lists = [candidate for candidate in sequential if candidate.is_list]
    # Names that end in numbers are a weaker sign than a list: a model may have norm1 and norm2.
    named = _outermost([c for c in sequential if not c.is_list and _same_operations(eqns, c)])
    for candidate in sorted(named, key=lambda candidate: -candidate.num_blocks):
        if all(_compatible(candidate, other) for other in lists):
            lists.append(candidate)
    return _without_overlaps(sorted(_outermost(lists), key=lambda blocks: blocks.ranges[0]))


def why_no_list(eqns: Sequence[Equation]) -> str | None:
    """Say why the longest list of modules is not a list of blocks, if there is such a list."""
    candidates = [c for c in _candidates(eqns) if c.is_list or c.num_blocks > 1]
    if not candidates:
        return None
    longest = max(candidates, key=lambda candidate: (candidate.num_blocks, candidate.is_list))
    if longest.num_blocks == 1:
        only = longest.elements[0]
        return f"only `{only}` of `{longest.path}` runs: others are the same module, or not called"
    for index, (a, b) in enumerate(pairwise(longest.ranges)):
        if a[1] > b[0]:
            first, second = longest.elements[index : index + 2]
            return f"`{first}` of `{longest.path}` runs again after `{second}` has started"
    return _what_differs(eqns, longest)


def _what_differs(eqns: Sequence[Equation], blocks: BlockList) -> str:
    """Say whether modules run different operations, or the same ones on different shapes."""
    runs = [eqns[start:stop] for start, stop in blocks.ranges]
    if len({tuple(eqn.primitive for eqn in run) for run in runs}) > 1:
        return f"the modules `{blocks.path}` run different operations"
    results = [list(aval_of(run[-1].outvars[0]).shape) for run in runs]
    known = list(dict.fromkeys(map(str, results)))
    if len(known) == 1:
        return f"the modules `{blocks.path}` run the same operations on different shapes"
    return (
        f"the results of the modules `{blocks.path}` have different shapes: {', '.join(known[:4])}"
    )


def _candidates(eqns: Sequence[Equation]) -> list[BlockList]:
    """Return all lists of modules with numbered names, in the order in which they start."""
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    for number, eqn in enumerate(eqns):
        for pattern, element in _elements(name_stack(eqn)).items():
            elements = spans.setdefault(pattern, {})
            start, _ = elements.get(element, (number, number))
            elements[element] = (start, number + 1)
    return [
        BlockList(pattern, tuple(elements), tuple(elements.values()))
        for pattern, elements in spans.items()
    ]


def _elements(stack: str) -> dict[str, str]:
    """Return, by pattern, the path of every numbered module in a name stack.

    Only the outermost element of a list counts: a module that several blocks share has the path of
    the first of them.
    """
    elements: dict[str, str] = {}
    for path in modules_of(stack):
        names = path.split(".")
        for position, name in enumerate(names):
            numbered = _ELEMENT.fullmatch(name)
            if numbered and (position or numbered[1]):
                pattern = ".".join([*names[:position], numbered[1] + "*"])
                elements.setdefault(pattern, ".".join(names[: position + 1]))
    return elements


def _same_operations(eqns: Sequence[Equation], blocks: BlockList) -> bool:
    """Whether all elements run the same operations on the same shapes."""
    kinds = {
        tuple((e.primitive, *(aval_of(v).shape for v in e.outvars)) for e in eqns[start:stop])
        for start, stop in blocks.ranges
    }
    return len(kinds) == 1


def _inside(inner: BlockList, outer: BlockList) -> bool:
    return inner is not outer and any(
        start <= inner.ranges[0][0] and inner.ranges[-1][1] <= stop for start, stop in outer.ranges
    )


def _compatible(named: BlockList, other: BlockList) -> bool:
    """Whether modules with numbered names leave a list whole, or contain it and are more."""
    if _inside(other, named):
        return named.num_blocks > other.num_blocks
    disjoint = _ends_before(named, other) or _ends_before(other, named)
    return disjoint or _inside(named, other)


def _ends_before(one: BlockList, other: BlockList) -> bool:
    return one.ranges[-1][1] <= other.ranges[0][0]


def _outermost(lists: Sequence[BlockList]) -> list[BlockList]:
    return [blocks for blocks in lists if not any(_inside(blocks, other) for other in lists)]


def _without_overlaps(lists: Sequence[BlockList]) -> list[BlockList]:
    """Keep the first of lists whose elements alternate; its blocks contain the others' elements."""
    kept: list[BlockList] = []
    for blocks in lists:
        if not kept or _ends_before(kept[-1], blocks):
            kept.append(blocks)
    return kept


@dataclass(frozen=True)
class Outside:
    """Equations outside of blocks."""

    eqns: tuple[Equation, ...]


@dataclass(frozen=True)
class BlockSegment:
    """The equations of a block, what it reads from outside, and which results are read outside."""

    eqns: tuple[Equation, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]


Segment = Outside | BlockSegment


def cut_segments(jaxpr: Jaxpr) -> list[Segment]:
    """Cut a program before and after each block."""
    segments: list[Segment] = []
    done = 0
    for blocks in find_block_lists(jaxpr.eqns):
        for start, stop in blocks.ranges:
            segments.append(Outside(tuple(jaxpr.eqns[done:start])))
            segments.append(_block(jaxpr, start, stop))
            done = stop
    segments.append(Outside(tuple(jaxpr.eqns[done:])))
    return [segment for segment in segments if segment.eqns]


def cut_iteration(jaxpr: Jaxpr, *, by_block: bool) -> list[BlockSegment]:
    """Return an iteration of a loop over repeated blocks, block by block or as a single one."""
    found = find_block_lists(jaxpr.eqns) if by_block else []
    lists = [blocks for blocks in found if blocks.is_period]
    starts = [start for blocks in lists[:1] for start, _ in blocks.ranges[1:]]
    cuts = [0, *starts, len(jaxpr.eqns)]
    return [_block(jaxpr, start, stop) for start, stop in pairwise(cuts)]


def _block(jaxpr: Jaxpr, start: int, stop: int) -> BlockSegment:
    eqns = jaxpr.eqns[start:stop]
    computed = [variable for eqn in eqns for variable in eqn.outvars]
    read_later = {*variables_read(jaxpr.eqns[stop:]), *variables(jaxpr.outvars)}
    inside = set(computed)
    return BlockSegment(
        eqns=tuple(eqns),
        reads=tuple(variable for variable in variables_read(eqns) if variable not in inside),
        results=tuple(variable for variable in computed if variable in read_later),
    )
