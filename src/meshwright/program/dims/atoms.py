"""Dims as products of factors, merged by union-find into classes of the same dim.

A dim is a tuple of factors, major first. Unifying two dims splits their factors until they match
(128 and 8 × 16 become 8 × 16 on both sides) and merges them pair by pair. A factor that is not
split is an atom; atoms with the same id form a class and can only be sharded together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Atom(NamedTuple):
    """One factor of a dim.

    Attributes:
        id: the class it belongs to, equal for all dims that must be sharded together.
        size: its length.
    """

    id: int
    size: int


class Factor:
    """A node of the union-find; ``split`` has the factors it is split into, major first."""

    __slots__ = ("parent", "serial", "size", "split")

    def __init__(self, size: int, serial: int) -> None:
        self.size = size
        self.serial = serial
        self.parent: Factor | None = None
        self.split: tuple[Factor, Factor] | None = None


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]

NO_DIM: Dim = ()
"""A dim of size 1: it has no factors."""


class Factors:
    """Makes factors and merges them. Serial numbers make the class ids reproducible."""

    def __init__(self) -> None:
        self._next = 0

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

    def _factor(self, size: int) -> Factor:
        self._next += 1
        return Factor(size, self._next)


def atoms(dim: Dim) -> tuple[Atom, ...]:
    """Return the atoms of a dim, major first."""
    return tuple(Atom(leaf.serial, leaf.size) for leaf in _leaves(dim))


def _root(factor: Factor) -> Factor:
    while factor.parent is not None:
        if factor.parent.parent is not None:
            factor.parent = factor.parent.parent
        factor = factor.parent
    return factor


def _leaves(dim: Dim) -> Iterable[Factor]:
    stack = list(reversed(dim))
    while stack:
        yield _pop(stack)


def _pop(stack: list[Factor]) -> Factor:
    """Take the next factor that is not split, replacing split ones by their factors."""
    while True:
        top = _root(stack.pop())
        if top.split is None:
            return top
        stack.extend(reversed(top.split))


def _merge(a: Factor, b: Factor) -> None:
    if a is b:
        return
    # The older one becomes the root, so that a class keeps its id while it grows.
    older, younger = (a, b) if a.serial < b.serial else (b, a)
    younger.parent = older
