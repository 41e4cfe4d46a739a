"""How long scheduled kernels take on a chip: by their products, and by the bytes they move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hardware import Chip
from meshwright.planner.workload.array_operations import OPAQUE, Array, Operation
from meshwright.planner.workload.kernel_schedule import Kernel
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.program.flops import equation_flops
from meshwright.program.kernels.fused_attention import PLANNED, PLANNED_GRADIENT

_ATTENTION_SHARE = {PLANNED: 0.62, PLANNED_GRADIENT: 0.475}
"""Share of a chip's attainable product rate that attention kernels reach, measured."""

_ATTENTION_PRODUCTS = {PLANNED: 2, PLANNED_GRADIENT: 5}
"""Products of queries, keys and values in the two passes."""

_ALONE = 1.07
"""Rate of a product's arithmetic relative to a large product with its memory traffic, fitted."""

_OVERLAP = 0.58
"""The part of a product's memory traffic that its arithmetic does not hide, fitted."""

_READ_ONCE = 0.62
"""The part of what kernels read and write that is left when compilers join those which read the
same arrays, fitted."""

_ITERATION = {"cuda": 140e-6, "rocm": 140e-6}
"""Seconds of one iteration of a loop besides its kernels, by platform: the host asks whether it
goes on, and nothing overlaps. Fitted."""

_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})


@dataclass(frozen=True)
class Work:
    """What one kernel does on a device.

    Attributes:
        kind: a product, a pass of attention, an iteration of a loop, or memory that is moved.
        flops: its operations.
        nbytes: the bytes it reads and writes.
        times: how often it runs.
        in_loop: whether a loop runs it.
    """

    kind: str
    flops: float
    nbytes: float
    times: int
    in_loop: bool = False


def works_of(kernels: Sequence[Kernel], sizes: DeviceSizes) -> Iterator[Work]:
    """Yield what each kernel does, those of loops as often as they run."""
    for work in _works_of(kernels, sizes, 1):
        yield replace(work, in_loop=work.times > 1)


def _works_of(kernels: Sequence[Kernel], sizes: DeviceSizes, times: int) -> Iterator[Work]:
    for kernel in kernels:
        operation = kernel.operation
        if kernel.bodies:
            if operation.name == "scan" and kernel.times > 1:
                yield Work("loop", 0.0, 0.0, times * kernel.times)
            # Branches are alternatives, and a while loop's condition is small beside its body.
            bodies = [list(_works_of(b, sizes, times * kernel.times)) for b in kernel.bodies]
            yield from max(bodies, key=_amount)
            continue
        nbytes = _moved(kernel, sizes)
        if operation.name.startswith(OPAQUE):
            yield _attention(operation, sizes, nbytes, times)
        elif operation.name in _PRODUCTS:
            flops = equation_flops(operation.eqn) * _part(operation, sizes)
            yield Work("product", flops, nbytes, times)
        else:
            yield Work("memory", 0.0, nbytes, times)


def seconds_of(work: Work, chip: Chip, product_rate: float) -> float:
    """Return the seconds of one run of a kernel.

    Args:
        work: what it does.
        chip: where.
        product_rate: operations per second that large products reach.
    """
    memory = work.nbytes / (chip.hbm_tb_per_s_per_device * 1e12 * chip.hbm_share)
    launch = chip.launch_us * 1e-6
    if work.kind in _ATTENTION_SHARE:
        rate = product_rate * _ATTENTION_SHARE[work.kind]
        return max(work.flops / rate, memory) + launch
    if work.kind == "product":
        compute = work.flops / (product_rate * _ALONE)
        return max(compute, memory) + _OVERLAP * min(compute, memory) + launch
    if work.kind == "loop":
        return _ITERATION.get(chip.platform, 0.0)
    return _READ_ONCE * memory + launch


def _amount(works: Sequence[Work]) -> float:
    """Return how much some kernels do, to compare them."""
    return sum(work.times * (work.flops + work.nbytes) for work in works)


def _moved(kernel: Kernel, sizes: DeviceSizes) -> float:
    """Return the bytes that a kernel reads and writes."""
    operation = kernel.operation
    written = sum(map(sizes.of, kernel.writes)) or sum(map(sizes.of, operation.writes))
    if operation.name == "gather":
        # Only the rows that are looked up are read.
        return 2 * written
    if operation.name.startswith("scatter"):
        updates = operation.reads[-1]
        return 3 * (sizes.of(updates) if updates is not None else 0.0)
    copied = 2 * sum(map(sizes.of_copy, kernel.copied))
    read = sum(min(sizes.of(whole), sizes.of(part)) for whole, part in kernel.reads)
    return written + read + copied


def _part(operation: Operation, sizes: DeviceSizes) -> float:
    """Return the part of a product that one device computes."""
    arrays = [a for a in (*operation.reads[:2], *operation.writes[:1]) if a is not None]
    joined = Array(tuple(dim for array in arrays for dim in array.dims), 1)
    return sizes.part(joined)


def _attention(operation: Operation, sizes: DeviceSizes, nbytes: float, times: int) -> Work:
    query, key = operation.reads[0], operation.reads[1]
    assert query is not None
    assert key is not None
    kind, _, part = operation.name.rpartition("_")
    elements = query.size * sizes.part(query)
    flops = 2 * _ATTENTION_PRODUCTS[kind] * elements * _length(key.dims[1]) * int(part) / 1000
    return Work(kind, flops, nbytes, times)


def _length(dim: Sequence[Any]) -> int:
    return math.prod(atom.size for atom in dim)
