"""A mutation: one deliberate error in the program, and the check that has to notice it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pytest

Patch = pytest.MonkeyPatch
Failures = Mapping[str, str]
"""By comparison that failed, such as ``float64 gradients``: the first thing that differs in it."""


class Check(Protocol):
    """A check that a user can run, in one configuration."""

    name: str
    """What the table calls it."""

    def failures(self, *, everything: bool) -> Failures:
        """Run the check and return what failed.

        Args:
            everything: compute everything anew, also what no part of the mesh is involved in.
        """
        ...


@dataclass(frozen=True)
class Mutation:
    """One sabotage.

    Attributes:
        does: what goes wrong, as a line of the table.
        seen: where this kind of error is known from; empty if it is obvious.
        break_it: applies it.
        check: what must notice it.
        caught: the comparisons that must fail, the most telling first.
        names: what the first of them must name as different.
        only: whether nothing else may fail.
        everyday: whether it belongs to the everyday tests.
        everywhere: whether the mutated code also runs on one device, as tracing does.
    """

    does: str
    break_it: Callable[[Patch], None]
    check: Check
    caught: tuple[str, ...]
    seen: str = ""
    names: str = ""
    only: bool = False
    everyday: bool = False
    everywhere: bool = False
