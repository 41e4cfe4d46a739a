"""The exchanges of a tick, run in a fixed order on CPUs so that devices cannot deadlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.pipeline.aliases import Array
from meshwright.pipeline.execute.op_counts import named
from meshwright.pipeline.execute.slots import looped

T = TypeVar("T")


class ExchangeOrder:
    """Orders the exchanges of one tick.

    A CPU runs operations that do not depend on each other in any order, and each exchange blocks
    a thread until all its devices have arrived: devices that begin with different exchanges wait
    for each other forever. There, each exchange waits for the one before; accelerators keep the
    program's order anyway.

    Args:
        platform: of the devices.
    """

    def __init__(self, platform: str) -> None:
        self._waits = platform == "cpu"
        self._previous: Array | None = None

    def when(self, name: str, needed: Array, update: Callable[[T], T], values: T) -> T:
        """Return updated values where there is something to do; see `arrays.when`.

        Args:
            name: of the operation, in the compiled program; see `op_counts`.
            needed: whether there is something to do.
            update: does it.
            values: what it changes.
        """
        if self._waits and self._previous is not None:
            # Always false, but known only when the previous exchange is over.
            needed = needed | self._previous
        self._previous, values = looped(needed, named(name, update), values)
        return values

    def send(
        self,
        name: str,
        values: T,
        axis: str,
        pairs: Sequence[tuple[int, int]],
        needed: Array | None,
    ) -> T:
        """Send values along a mesh axis.

        Args:
            name: of the operation, in the compiled program; see `op_counts`.
            values: what is sent.
            axis: the mesh axis.
            pairs: who sends to whom.
            needed: whether anyone needs them; None for always.
        """

        def permute(values: T) -> T:
            return jax.tree.map(lambda value: lax.ppermute(value, axis, pairs), values)

        if self._waits:
            always = jnp.ones((), bool) if needed is None else needed
            return self.when(name, always, permute, values)
        permuted = named(name, permute)
        if needed is None:
            return permuted(values)
        return lax.cond(needed, lambda: permuted(values), lambda: values)
