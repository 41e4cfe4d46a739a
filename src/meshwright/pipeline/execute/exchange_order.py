"""The exchanges of a tick, run in a fixed order on CPUs so that devices cannot deadlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.pipeline.aliases import Array
from meshwright.pipeline.execute.op_counts import TickOp, named
from meshwright.pipeline.execute.slots import looped

T = TypeVar("T")


class ExchangeOrder:
    """Orders the exchanges of one tick.

    A CPU runs operations that do not depend on each other in any order, and each exchange blocks
    a thread until all its devices have arrived: devices that begin with different exchanges wait
    for each other forever. There, each exchange waits for the one before; accelerators keep the
    program's order anyway.

    Args:
        platform: the platform of the devices.
    """

    def __init__(self, platform: str) -> None:
        self._waits = platform == "cpu"
        self._previous: Array | None = None

    def when(self, operation: TickOp, needed: Array, update: Callable[[T], T], values: T) -> T:
        """Return ``update(values)`` if needed, else the values; see `slots.when`.

        Args:
            operation: the operation of the tick.
            needed: whether there is something to do.
            update: returns the new values.
            values: the values to update.
        """
        if self._waits and self._previous is not None:
            # Always false, but known only when the previous exchange is over.
            needed = needed | self._previous
        self._previous, values = looped(needed, named(operation, update), values)
        return values

    def send(
        self,
        operation: TickOp,
        values: T,
        axis: str,
        pairs: Sequence[tuple[int, int]],
        needed: Array | None,
    ) -> T:
        """Send values along a mesh axis.

        Args:
            operation: the operation of the tick.
            values: the values to send.
            axis: the mesh axis.
            pairs: pairs of sender and receiver.
            needed: whether any stage needs the values; None for always.
        """

        def permute(values: T) -> T:
            return jax.tree.map(lambda value: lax.ppermute(value, axis, pairs), values)

        if self._waits:
            always = jnp.ones((), bool) if needed is None else needed
            return self.when(operation, always, permute, values)
        permuted = named(operation, permute)
        if needed is None:
            return permuted(values)
        return lax.cond(needed, lambda: permuted(values), lambda: values)
