"""Exchanges between stages: their order within a tick, and a check that none can hang."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from meshwright.compiled.divergence import divergent_permutes
from meshwright.errors import Setting, UserError
from meshwright.mesh.axes import PIPE
from meshwright.pipeline.execute.slots import looped
from meshwright.pipeline.execute.tick_rows import TickOp, named
from meshwright.program.jaxpr.names import module_of

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Transfer(Generic[T]):
    """What stages send to their neighbors, by pairs; ``needed`` is None if it always is."""

    operation: TickOp
    values: T
    pairs: Sequence[tuple[int, int]]
    needed: Array | None

    def permuted(self, values: T) -> T:
        """Return what arrives if these values are sent."""
        return jax.tree.map(lambda value: lax.ppermute(value, PIPE, self.pairs), values)


class ExchangeOrder:
    """Orders the exchanges of one tick.

    A CPU runs operations that do not depend on each other in any order, and each exchange blocks a
    thread until all its devices have arrived: devices that begin with different exchanges wait for
    each other forever. There, each exchange waits for the one before; accelerators keep the
    program's order anyway.
    """

    def __init__(self, platform: str) -> None:
        self._waits = platform == "cpu"
        self._previous: Array | None = None

    def when(self, operation: TickOp, needed: Array, update: Callable[[T], T], values: T) -> T:
        """Return ``update(values)`` if needed, else the values; see `slots.when`.

        What ``update`` updates itself is ordered before what follows.
        """
        previous = self._previous
        if self._waits and previous is not None:
            # Always false, but known only after the previous exchange.
            needed = needed | previous

        def run(values: T) -> T:
            # This may be traced more than once, each time from the same start.
            self._previous = previous
            return update(values)

        self._previous, values = looped(needed, named(operation, run), values)
        return values

    def send(self, transfer: Transfer[T]) -> T:
        """Send values from stage to stage and return what arrives."""
        permuted, needed, values = transfer.permuted, transfer.needed, transfer.values
        if self._waits:
            always = jnp.ones((), bool) if needed is None else needed
            return self.when(transfer.operation, always, permuted, values)
        send = named(transfer.operation, permuted)
        return send(values) if needed is None else lax.cond(needed, send, lambda v: v, values)

    def exchange(self, ahead: Transfer[T], back: Transfer[S]) -> tuple[T, S]:
        """Send values in both directions, as far as needed, and return what arrives."""
        if self._waits or ahead.needed is None or back.needed is None:
            return self.send(ahead), self.send(back)
        # One question to the host instead of two.
        only_send = named(TickOp.ONLY_SEND, ahead.permuted)
        both_send = named(TickOp.BOTH_SEND, ahead.permuted)
        only_back = named(TickOp.ONLY_SEND_BACK, back.permuted)
        both_back = named(TickOp.BOTH_SEND_BACK, back.permuted)
        return lax.switch(
            ahead.needed.astype(jnp.int32) + 2 * back.needed.astype(jnp.int32),
            [
                lambda a, b: (a, b),
                lambda a, b: (only_send(a), b),
                lambda a, b: (a, only_back(b)),
                lambda a, b: (both_send(a), both_back(b)),
            ],
            ahead.values,
            back.values,
        )


def check_exchanges(program: str, mesh: Mesh) -> None:
    """Refuse a compiled program, given as text, whose stages would wait for each other forever."""
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    permutes = divergent_permutes(program, sizes, PIPE)
    if not permutes:
        return
    module, operation = module_of(permutes[0]), permutes[0].rpartition("/")[2]
    where = f" in `{module}`" if module else ""
    others = {a: n for a, n in sizes.items() if a != PIPE and n > 1}
    axes = " and ".join(f"{axis}={size}" for axis, size in others.items())
    raise UserError(
        f"the model cannot be divided into pipeline stages on this mesh: the compiler moves "
        f"pieces of an array for `{operation}`{where} between the devices of a stage",
        why=f"the array is sharded over {axes}, and stages, which work at different times, "
        "would wait for each other forever",
        fix=f"leave out one of these axes or {Setting('mesh.pipe')}, or do not shard the array "
        f"({Setting('sharding.rules')})",
    )
