"""Dims as products of factors, merged by union-find into classes of the same dim.

A dim is a tuple of factors, major first. Unifying two dims splits their factors until they match
(128 and 8 × 16 become 8 × 16 on both sides) and merges them pair by pair. Factors with the same id
form a class: they can only be sharded together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple


class DimFactor(NamedTuple):
    """One factor of a dim, which is not split any further.

    Its ``id`` is equal for all dims that must be sharded together.
    """

    id: int
    size: int


@dataclass(slots=True, eq=False)
class Node:
    """A factor in the union-find; ``split`` has the factors it is split into, major first."""

    size: int
    serial: int
    parent: Node | None = None
    split: tuple[Node, Node] | None = None


Dim = tuple[Node, ...]
Dims = tuple[Dim, ...]

NO_DIM: Dim = ()
"""A dim of size 1: it has no factors."""


class Factors:
    """Makes factors and merges them. Serial numbers make the class ids reproducible."""

    def __init__(self) -> None:
        self._serials = count(1)

    def dim(self, size: int) -> Dim:
        """Return a new dim, unrelated to any other."""
        return NO_DIM if size == 1 else (self._factor(size),)

    def dims(self, shape: Iterable[int]) -> Dims:
        """Return new dims for a whole shape."""
        return tuple(self.dim(size) for size in shape)

    def unify(self, left: Dim, right: Dim) -> Dim:
        """Merge two dims from the major end; return the factors of ``left`` that do not match.

        Factors that match before the first mismatch stay merged, because every index is split in
        the same way up to there.
        """
        left_stack, right_stack = list(reversed(left)), list(reversed(right))
        while left_stack and right_stack:
            a, b = _pop(left_stack), _pop(right_stack)
            if a.size == b.size:
                _merge(a, b)
                continue
            left_stack.append(a)
            right_stack.append(b)
            common = math.gcd(a.size, b.size)
            if common == 1 or a.size * b.size == 0:
                break
            for factor in (a, b):
                if factor.size > common:
                    factor.split = self._factor(common), self._factor(factor.size // common)
        return tuple(reversed(left_stack))

    def _factor(self, size: int) -> Node:
        return Node(size, next(self._serials))


def factors_of(dim: Dim) -> tuple[DimFactor, ...]:
    """Return the factors of a dim, major first."""
    return tuple(DimFactor(leaf.serial, leaf.size) for leaf in _leaves(dim))


def class_ids(dims: Iterable[Dim]) -> frozenset[int]:
    """Return the classes of all factors of some dims."""
    return frozenset(leaf.serial for dim in dims for leaf in _leaves(dim))


def _root(factor: Node) -> Node:
    while factor.parent is not None:
        if factor.parent.parent is not None:
            factor.parent = factor.parent.parent
        factor = factor.parent
    return factor


def _leaves(dim: Dim) -> Iterable[Node]:
    stack = list(reversed(dim))
    while stack:
        yield _pop(stack)


def _pop(stack: list[Node]) -> Node:
    """Take the next factor that is not split, replacing split ones by their factors."""
    while True:
        top = _root(stack.pop())
        if top.split is None:
            return top
        stack.extend(reversed(top.split))


def _merge(a: Node, b: Node) -> None:
    if a is b:
        return
    # The older one becomes the root, so that a class keeps its id while it grows.
    older, younger = (a, b) if a.serial < b.serial else (b, a)
    younger.parent = older
