"""Rehearsals: a step compiled for devices that are not there, and run on the one GPU there is."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.compiled.compile_program import CompiledProgram, compile_program
from meshwright.compiled.memory import MemoryUse
from meshwright.compiled.quick_options import quick_options
from meshwright.ledgers import Ledger, lower_step, read_ledger
from meshwright.plan import Plan
from meshwright.planner.fit.fit_check import batch_shapes, least_memory
from meshwright.planner.fit.out_of_memory import KnownProgram, MemoryAdvice
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled

CPU_PROGRAM = (
    "Compiled for CPUs: state, batch and what is sent are the same on accelerators. Temporary "
    "values and time are not, because CPUs have other kernels."
)
"""What a program for virtual CPU devices says about others."""

RUNS = 7
"""Updates that are run on a GPU; the first two fill caches."""


@dataclass(frozen=True)
class Measured:
    """What running the program of one device shows.

    Attributes:
        compute_seconds: the median time of an update; nothing is sent.
        peak_bytes: the most memory that was in use; None if the device does not say.
    """

    compute_seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Rehearsal:
    """A step that was compiled for some devices.

    Attributes:
        plan: the plan.
        compiled_for: the devices, in words.
        for_gpus: whether those are GPUs.
        memory: the memory of the compiled program on each device.
        state: bytes of parameters, model state and optimizer state on each device, exact; the step
            itself counts a few bytes more.
        batch: bytes of the batch on each device.
        ledger: what the program sends.
        compile_seconds: how long compiling took.
        measured: what running it showed; None if it did not run.
    """

    plan: Plan
    compiled_for: str
    for_gpus: bool
    memory: MemoryUse
    state: int
    batch: int
    ledger: Ledger
    compile_seconds: float
    measured: Measured | None = None


def rehearse(assembled: Assembled, *, run: bool = False) -> Rehearsal:
    """Compile a step for its mesh, and run the program of one device if asked.

    Args:
        assembled: the step, on virtual or mocked devices.
        run: whether to run it, on the one GPU that stands for all.
    """
    devices = assembled.mesh.devices
    on_gpus = devices.flat[0].platform == "gpu"
    advice = MemoryAdvice(assembled)
    with advice.during(lambda: "compiling the step"), activity("compiling the step"):
        lowered = lower_step(assembled, batch_shapes(assembled))
        started = time.perf_counter()
        # On CPUs nothing runs, so that machine code need not be polished; for GPUs that is quick.
        program = compile_program(lowered, {} if on_gpus else quick_options())
        seconds = time.perf_counter() - started
    least = least_memory(assembled)
    known = KnownProgram(program.memory, program.optimized_or_none)
    measured = None
    if run:
        with advice.during(lambda: "running the step", known), activity("running the step"):
            measured = _measure(assembled, program)
    return Rehearsal(
        plan=assembled.plan,
        compiled_for=f"{devices.size} × {devices.flat[0].device_kind}"
        + f" ({_existence(devices.flat[0], run=run)})",
        for_gpus=on_gpus,
        memory=program.memory,
        state=least.state,
        batch=least.batch,
        ledger=read_ledger(assembled, program, compile_seconds=seconds),
        compile_seconds=round(seconds, 2),
        measured=measured,
    )


def _existence(device: Any, *, run: bool) -> str:
    """Say in which sense a device is there."""
    if run:
        return "mocked"
    return "virtual" if device.platform == "cpu" else "none of them here"


def _measure(assembled: Assembled, program: CompiledProgram) -> Measured:
    """Run the program of the first device with zeros, which take as long as any other values."""
    step = assembled.step
    abstract = (step.abstract_state(), batch_shapes(assembled))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state, batch = jax.jit(lambda: jax.tree.map(_zeros, abstract), out_shardings=shardings)()
    seconds: list[float] = []
    for _ in range(RUNS):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, metrics = program.compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Measured(statistics.median(seconds[2:]), stats.get("peak_bytes_in_use"))


def _zeros(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)
