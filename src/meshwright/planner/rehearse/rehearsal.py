"""Rehearsals: a step compiled for devices that are not there, and how each figure is known."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright.compiled.compile_program import CompiledProgram, compile_program, quick_options
from meshwright.compiled.memory import MemoryUse, memory_stats
from meshwright.hardware import Hardware
from meshwright.ledgers import Ledger, lower_step, read_ledger
from meshwright.plan import Plan
from meshwright.planner.devices.links import axis_links, collective_seconds
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.fit.fit_check import batch_shapes, least_memory
from meshwright.planner.fit.out_of_memory import KnownProgram, MemoryAdvice
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.text.columns import Columns
from meshwright.text.units import human_bytes, human_seconds

CPU_PROGRAM = (
    "Compiled for CPUs: state, batch and what is sent are the same on accelerators. Temporary "
    "values and time are not, because CPUs have other kernels."
)
"""What a program for virtual CPU devices says about others."""

RUNS = 7
"""Steps that are run on a GPU; the first two fill caches."""


@dataclass(frozen=True)
class Measured:
    """The median time of a step of one device, which sends nothing, and its peak of memory."""

    compute_seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Rehearsal:
    """A step that was compiled for some devices.

    Memory, state and batch are bytes on each device. ``state`` is parameters, model state and
    optimizer state, exact; the step itself counts a few bytes more.
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
    """Compile a step for its mesh, and run the program on the GPU that stands for all if asked."""
    devices = assembled.mesh.devices
    on_gpus = devices.flat[0].platform == "gpu"
    advice = MemoryAdvice(assembled)
    with advice.during(lambda: "compiling the step"), activity("compiling the step"):
        lowered = lower_step(assembled, batch_shapes(assembled))
        started = time.perf_counter()
        # Nothing runs on CPUs, so their machine code need not be optimized; for GPUs that is quick.
        program = compile_program(lowered, {} if on_gpus else quick_options())
        seconds = time.perf_counter() - started
    least = least_memory(assembled)
    known = KnownProgram(program.memory, program.optimized_or_none)
    measured = None
    if run:
        with advice.during(lambda: "running the step", known), activity("running the step"):
            measured = _measure(assembled, program)
    kind = "virtual" if devices.flat[0].platform == "cpu" else "none of them here"
    return Rehearsal(
        plan=assembled.plan,
        compiled_for=f"{devices.size} × {devices.flat[0].device_kind}"
        + f" ({'mocked' if run else kind})",
        for_gpus=on_gpus,
        memory=program.memory,
        state=least.state,
        batch=least.batch,
        ledger=read_ledger(assembled, program, compile_seconds=seconds),
        compile_seconds=round(seconds, 2),
        measured=measured,
    )


def _measure(assembled: Assembled, program: CompiledProgram) -> Measured:
    """Run the program of the first device with zeros, which take as long as any other values."""
    abstract = (assembled.step.abstract_state, batch_shapes(assembled))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state, batch = jax.jit(lambda: jax.tree.map(_zeros, abstract), out_shardings=shardings)()
    seconds: list[float] = []
    for _ in range(RUNS):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, metrics = program.compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    peak = memory_stats(jax.local_devices()[0]).get("peak_bytes_in_use")
    return Measured(statistics.median(seconds[2:]), peak)


def _zeros(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


Source = Literal["measured", "compiled", "modelled", "measured + modelled"]


@dataclass(frozen=True)
class Figure:
    """One figure of a step, how it is known, and what the planner predicts if it does."""

    name: str
    value: float
    unit: Literal["bytes", "seconds"]
    source: Source
    predicted: float | None = None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of the figure; None if that is not known."""
        if self.predicted is None or (self.predicted and not self.value):
            return None
        return self.predicted / self.value - 1 if self.value else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "error": self.error}


def make_figures(
    rehearsal: Rehearsal, hardware: Hardware | None, estimate: Estimate | None
) -> list[Figure]:
    """Return all figures of a rehearsed step.

    A program for CPUs is compared in what is the same on all devices: state, batch and what is
    sent. Without ``hardware``, times of communication are left out.
    """
    return [*_memory(rehearsal, estimate), *_times(rehearsal, hardware, estimate)]


def figures_table(figures: Sequence[Figure], *, errors: bool = True) -> Columns:
    """Return figures as a table, a row each; ``errors`` shows how far predictions are off."""
    head = ("per device and step", "", "how it is known", "predicted", "error")
    rows = [
        (
            f.name,
            _shown(f.value, f.unit),
            f.source,
            "" if f.predicted is None else _shown(f.predicted, f.unit),
            "" if f.predicted is None else percent(f.error),
        )
        for f in figures
    ]
    predicted = any(f.predicted is not None for f in figures)
    shown = 5 if predicted and errors else 4 if predicted else 3
    right = tuple(name for name in ("", "predicted", "error") if name in head[:shown])
    return Columns(head[:shown], [row[:shown] for row in rows], right=right)


def percent(error: float | None) -> str:
    """Return a relative error for reading: ``+3.1%``, or ``exact``."""
    if error is None:
        return "–"
    return "exact" if error == 0 else f"{error:+.1%}"


def sending_seconds(ledger: Ledger, hardware: Hardware) -> dict[str, float]:
    """Return how long what a program sends takes by itself, by the slowest axis of collectives."""
    links = axis_links(hardware, ledger.mesh)
    seconds = dict.fromkeys(links, 0.0)
    for line in ledger.lines:
        over = [axis for axis in line.axes if axis in links]
        if over and line.count:
            slowest = min(over, key=lambda axis: links[axis].gb_per_s)
            each = line.payload_bytes / line.count
            one = collective_seconds(line.kind, each, links[slowest], hardware)
            seconds[slowest] += line.count * one
    return seconds


def _memory(rehearsal: Rehearsal, estimate: Estimate | None) -> Iterator[Figure]:
    memory, expected = rehearsal.memory, None if estimate is None else estimate.memory
    rest = memory.total - memory.argument
    predicted: list[int | None] = [None] * 4
    if expected is not None:
        predicted[:2] = expected.state, expected.batch
    if expected is not None and rehearsal.for_gpus:
        other = expected.compiled - expected.state - expected.batch
        predicted[2:] = other, expected.compiled
    names = ("state", "batch", "temporary values", "all of the program")
    values = (rehearsal.state, rehearsal.batch, rest, memory.total)
    for name, value, guess in zip(names, values, predicted, strict=True):
        yield Figure(name, value, "bytes", "compiled", guess)
    if rehearsal.measured is not None and rehearsal.measured.peak_bytes is not None:
        total = None if expected is None else expected.total
        peak = rehearsal.measured.peak_bytes
        yield Figure("peak of the memory in use", peak, "bytes", "measured", total)


def _times(
    rehearsal: Rehearsal, hardware: Hardware | None, estimate: Estimate | None
) -> Iterator[Figure]:
    ledger, time = rehearsal.ledger, None if estimate is None else estimate.time
    alone = {} if hardware is None else sending_seconds(ledger, hardware)
    for axis, own in ledger.axes.items():
        traffic = None if time is None else time.traffic.get(axis)
        sent = None if traffic is None else traffic.sent_bytes
        yield Figure(f"sent over {axis}", own.sent_bytes, "bytes", "compiled", sent)
        if axis in alone:
            seconds, expected = alone[axis], None if traffic is None else traffic.seconds
            if not rehearsal.for_gpus and expected is not None:
                # A program for CPUs sends arrays one by one, each of which takes a latency.
                seconds, expected = expected, None
            yield Figure(f"sending over {axis}", seconds, "seconds", "modelled", expected)
    exposed = sum(
        seconds * (1 - (ledger.axes[axis].overlapped or 0.0)) for axis, seconds in alone.items()
    )
    if rehearsal.measured is None:
        if time is not None and rehearsal.for_gpus:
            own = time.compute + time.staging + time.bubble + exposed
            yield Figure("step", own, "seconds", "modelled", time.step)
        elif time is not None:
            yield Figure("step", time.step, "seconds", "modelled")
        return
    compute = rehearsal.measured.compute_seconds
    expected = time and time.compute + time.staging
    yield Figure("computing", compute, "seconds", "measured", expected)
    if alone or not ledger.axes:
        source: Source = "measured + modelled" if alone else "measured"
        yield Figure("step", compute + exposed, "seconds", source, time and time.step)


def _shown(value: float, unit: str) -> str:
    return human_bytes(value) if unit == "bytes" else human_seconds(value)
