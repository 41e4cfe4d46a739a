"""What exchanges values within a tick, one after the other where a runtime would mix them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from meshwright.pipeline.arrays import looped
from meshwright.pipeline.op_counts import named

T = TypeVar("T")


class ExchangeOrder:
    """The exchanges of one tick.

    A CPU runs operations that do not depend on each other in any order, and each exchange holds
    a thread until everyone has come: devices that begin with different ones wait for each other
    forever. There, each waits for the one before; accelerators keep the program's order anyway.

    Args:
        platform: of the devices.
    """

    def __init__(self, platform: str) -> None:
        self._waits = platform == "cpu"
        self._busy: Array | None = None

    def when(self, name: str, needed: Array, update: Callable[[T], T], values: T) -> T:
        """Return updated values where there is something to do; see `arrays.when`.

        Args:
            name: of the operation, in the compiled program; see `executed`.
            needed: whether there is something to do.
            update: does it.
            values: what it changes.
        """
        if self._waits and self._busy is not None:
            # Never true, but known only when the one before is over.
            needed = needed | self._busy
        self._busy, values = looped(needed, named(name, update), values)
        return values

    def send(
        self,
        name: str,
        values: list[Any],
        axis: str,
        pairs: Sequence[tuple[int, int]],
        needed: Array | None,
    ) -> list[Any]:
        """Hand values on along a mesh axis, where they are needed; None for always."""

        def permute(values: list[Any]) -> list[Any]:
            return [lax.ppermute(value, axis, pairs) for value in values]

        if self._waits:
            always = jnp.ones((), bool) if needed is None else needed
            return self.when(name, always, permute, values)
        permuted = named(name, permute)
        if needed is None:
            return permuted(values)
        return lax.cond(needed, lambda: permuted(values), lambda: values)
