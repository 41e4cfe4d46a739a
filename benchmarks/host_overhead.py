"""Measures the host time per step of three training loops, on a model of 866 small leaves.

The loops are the documented `nnx.jit` loop, a `jax.jit` loop over leaves flattened by hand, and
Meshwright's step, in one process on one device. They alternate in short blocks, so that load on the
machine affects all three equally; ratios are taken within a round.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from record import median_interval, verdict, write_record

from meshwright.config.batch import solve_batch
from meshwright.plan import Plan
from meshwright.step.assemble import assemble

ROUNDS = 40
BATCH, WIDTH, BLOCKS = 4, 16, 48
WITHIN, BELOW = 1.10, 5.0
"""Largest ratio of meshwright to the loop by hand; smallest ratio of nnx.jit to meshwright."""


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Add the block to x [B, D]."""
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])

    def __call__(self, x):
        """Pass x [B, D] through all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@dataclass
class Loop:
    """A training loop and its measurements.

    Attributes:
        step: runs one step and returns the loss, without waiting for it.
        block: steps per measurement.
        leaves: number of arrays that the step takes and returns.
        wall: milliseconds per step of each block.
        thread: milliseconds of CPU time per step of the calling thread, for each block.
    """

    step: Callable[[], jax.Array]
    block: int
    leaves: int
    wall: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Run a block of steps and read the clocks."""
        wall, thread = time.perf_counter(), time.thread_time()
        for _ in range(self.block):
            value = self.step()
        thread = time.thread_time() - thread
        jax.block_until_ready(value)
        self.wall.append((time.perf_counter() - wall) / self.block * 1e3)
        self.thread.append(thread / self.block * 1e3)


def documented(x: jax.Array) -> Loop:
    """The loop that Flax's guides show."""
    model = Deep(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    leaves = len(jax.tree.leaves(nnx.state((model, optimizer))))
    return Loop(lambda: step(model, optimizer, x), block=4, leaves=leaves)


def by_hand(x: jax.Array) -> Loop:
    """A loop without NNX: a jitted function of flat lists, which are donated."""
    optimizer = optax.adamw(1e-3)
    graph, params = nnx.split(Deep(nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    moments, moment_tree = jax.tree.flatten(optimizer.init(params))

    def update(leaves, moments, x):
        params = jax.tree.unflatten(tree, leaves)
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), x))(params)
        state = jax.tree.unflatten(moment_tree, moments)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves(params), jax.tree.leaves(state), value

    jitted = jax.jit(update, donate_argnums=(0, 1))
    held = [leaves, moments]

    def step() -> jax.Array:
        held[0], held[1], value = jitted(held[0], held[1], x)
        return value

    return Loop(step, block=20, leaves=len(leaves) + len(moments))


def meshwright(x: jax.Array) -> Loop:
    """Meshwright's step; it also reports the norm of the gradients."""
    plan = Plan(mesh={}, batch=solve_batch(replicas=1, global_batch_size=BATCH))
    assembled = assemble(Deep, loss, optax.adamw(1e-3), plan, x)
    batch = assembled.put_batch(x)
    held = [assembled.init(0)]

    def step() -> jax.Array:
        held[0], metrics = assembled.step(held[0], batch)
        return metrics["loss"]

    return Loop(step, block=20, leaves=len(jax.tree.leaves(held[0])))


def main() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, WIDTH)), jnp.float32)
    loops = {"nnx.jit": documented(x), "by hand": by_hand(x), "meshwright": meshwright(x)}
    check_same_work(loops)
    names = list(loops)
    for number in range(ROUNDS):
        for name in names[number % 3 :] + names[: number % 3]:
            loops[name].measure()
    report(loops)


def check_same_work(loops: dict[str, Loop]) -> None:
    """Compile all loops and check that their losses agree."""
    courses = {name: [float(loop.step()) for _ in range(3)] for name, loop in loops.items()}
    for course in courses.values():
        np.testing.assert_allclose(course, courses["by hand"], rtol=1e-5)


def report(loops: dict[str, Loop]) -> None:
    rows: dict[str, Any] = {}
    for name, loop in loops.items():
        rows[name] = {
            "leaves": loop.leaves,
            "ms_per_step": round(statistics.median(loop.wall), 3),
            "fastest_block_ms_per_step": round(min(loop.wall), 3),
            "thread_ms_per_step": round(statistics.median(loop.thread), 3),
        }
        print(f"{name:12}{rows[name]['ms_per_step']:9.2f} ms per step, {loop.leaves} leaves")
    ratios = {
        "meshwright / by hand": ratio(loops["meshwright"], loops["by hand"]),
        "nnx.jit / meshwright": ratio(loops["nnx.jit"], loops["meshwright"]),
    }
    targets = {
        "meshwright / by hand": f"at most {WITHIN}: "
        + verdict(ratios["meshwright / by hand"]["median"], WITHIN),
        "nnx.jit / meshwright": f"at least {BELOW:g}: "
        + verdict(ratios["nnx.jit / meshwright"]["median"], BELOW, at_most=False),
    }
    for name, found in ratios.items():
        low, high = found["interval"]
        print(f"{name:22}{found['median']:7.3f}  (95%: {low:.3f} to {high:.3f})  {targets[name]}")
    model = f"{BLOCKS} blocks of LayerNorm and two Linear layers, width {WIDTH}, batch {BATCH}"
    figures = {"model": model, "rounds": ROUNDS, "loops": rows, "ratios": ratios}
    write_record("host_overhead", {**figures, "targets": targets})


def ratio(one: Loop, other: Loop) -> dict[str, Any]:
    """Compare two loops round by round."""
    wall = [a / b for a, b in zip(one.wall, other.wall, strict=True)]
    median, low, high = median_interval(wall)
    return {
        "median": round(median, 3),
        "interval": [round(low, 3), round(high, 3)],
        "of_medians": round(statistics.median(one.wall) / statistics.median(other.wall), 3),
        "of_thread_medians": round(
            statistics.median(one.thread) / statistics.median(other.thread), 3
        ),
    }


if __name__ == "__main__":
    main()
