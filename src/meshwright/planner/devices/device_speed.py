"""How fast the devices of this machine are: products, memory and sums over devices, timed."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "all"
BLOCK = 64
"""Size of the random matrix that factors of products are tiled with."""
SUMS = 8
"""Sums of one program, each of which needs the result of the one before."""
SIZES = {"cpu": (64, 128, 256, 512, 1024)}
"""Sizes of the square products by platform, as far as time allows."""
LARGE_SIZES = (512, 1024, 2048, 4096, 8192)
TINY = 16
"""Size of a product of which only the launch takes time."""
ROUNDS = 4


@dataclass(frozen=True)
class Timed:
    """Seconds of a square product of this size."""

    size: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second."""
        return 2 * self.size**3 / self.seconds


@dataclass(frozen=True)
class DeviceTimer:
    """Times programs on some devices, all of which run the same at once, in so many seconds each.

    After the ``deadline`` of `time.perf_counter`, timings are as short as possible.
    """

    devices: Sequence[Any]
    seconds: float
    deadline: float = math.inf

    def products(self, dtype: str, launch: float) -> list[Timed]:
        """Time square products, as large as time allows; starting them is not counted."""
        timed: list[Timed] = []
        for size in SIZES.get(self.devices[0].platform, LARGE_SIZES):
            expected = 8 * timed[-1].seconds * self._chain(size) if timed else 0.0
            if 2 * expected > self.seconds or (len(timed) > 1 and self._is_late()):
                break
            timed.append(self.product(dtype, size, launch))
        return timed

    def product(self, dtype: str, size: int, launch: float) -> Timed:
        """Time a square product of this size."""
        seconds = self._product_seconds(dtype, size)
        return Timed(size, max(seconds - launch, seconds / 2))

    def launch_seconds(self) -> float:
        """Time to start an operation: that of a product too small to take any time itself."""
        return self._product_seconds("float32", TINY)

    def copy_bytes_per_s(self, nbytes: int) -> float:
        """Bytes that each device reads and writes per second."""
        values = self._spread(np.zeros((len(self.devices), nbytes // 4), np.float32))
        return 2 * nbytes / self._median(self._program(lambda x: x + 1), values)

    def all_reduce_seconds(self, nbytes: int) -> float:
        """Time of a sum over all devices."""
        count = len(self.devices)

        def sums(own: jax.Array) -> jax.Array:
            total = own
            for _ in range(SUMS):
                # Each device adds its own: the compiler leaves out sums of equal values.
                total = jax.lax.psum(total, AXIS) / count + own
            return total

        values = self._spread(np.zeros((count, max(nbytes // 4, 1)), np.float32))
        return self._median(self._program(sums), values) / SUMS

    def _product_seconds(self, dtype: str, size: int) -> float:
        chain, block = self._chain(size), min(size, BLOCK)
        tiles = size // block

        def products(x: jax.Array) -> jax.Array:
            # Behind the barrier the compiler no longer knows that the factor repeats.
            factor = y = jax.lax.optimization_barrier(jnp.tile(x[0], (tiles, tiles)))
            for _ in range(chain):
                y = y @ factor
            return y[None]

        # Random, since a product of equal numbers takes less power and runs faster; scaled so that
        # its powers neither overflow nor vanish.
        random = np.random.default_rng(0).normal(size=(block, block)) / block**0.5 / tiles
        values = np.broadcast_to(random, (len(self.devices), block, block))
        spread = self._spread(jnp.asarray(values, dtype))
        return self._median(self._program(products), spread) / chain

    def _chain(self, size: int) -> int:
        """Return how many products one program runs: many, if calling it takes longer than one."""
        short = 64 if self.devices[0].platform == "cpu" else 1024
        return max(4, min(64, 64 * short**2 // size**2))

    def _is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    def _spread(self, values: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(self._mesh(), PartitionSpec(AXIS)))

    def _program(self, work: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        spec = PartitionSpec(AXIS)
        return jax.jit(jax.shard_map(work, mesh=self._mesh(), in_specs=spec, out_specs=spec))

    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices, dtype=object), (AXIS,))

    def _median(self, program: Callable[[jax.Array], jax.Array], values: jax.Array) -> float:
        """Return the seconds of one call, of those that follow each other without a pause."""
        jax.block_until_ready(program(values))
        began = time.perf_counter()
        jax.block_until_ready(program(values))
        once = max(time.perf_counter() - began, 1e-7)
        calls = max(1, min(100, math.floor(self.seconds / ROUNDS / once / 2)))
        rounds: list[float] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            result = values
            for _ in range(calls):
                result = program(values)
            jax.block_until_ready(result)
            rounds.append((time.perf_counter() - began) / calls)
            if sum(rounds) * calls > self.seconds or self._is_late():
                break
        return statistics.median(rounds)


def fit_products(timed: Sequence[Timed]) -> tuple[float, float]:
    """Fit the rate of large products, FLOP/s, and the size at which a dim reaches half of it.

    A product of size d takes 2·d³ / rate · (1 + half / d)³. For each half on a fine grid the best
    rate is a mean of logarithms; the pair with the least error is returned.
    """
    sizes = np.array([t.size for t in timed], np.float64)
    logs = np.log([t.flops_per_s for t in timed])
    fits: list[tuple[float, float, float]] = []
    for half in (0.0, *np.geomspace(1, sizes.max(), 200).tolist()):
        rates = logs + 3 * np.log1p(half / sizes)
        fits.append((float(np.var(rates)), float(np.exp(np.mean(rates))), half))
    _, rate, half = min(fits)
    # The largest product that was timed is no estimate: rates beyond it are extrapolated.
    return max(rate, float(np.exp(logs.max()))), half
