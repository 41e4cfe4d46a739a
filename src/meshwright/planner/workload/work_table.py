"""What kernels do on a device, in arithmetic and memory traffic, and how long that takes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.hardware import Chip
from meshwright.planner.workload.array_operations import OPAQUE, Array, Operation
from meshwright.planner.workload.gpu_rules import KERNEL_TIMES, PLATFORMS, KernelTimes
from meshwright.planner.workload.kernel_schedule import Kernel
from meshwright.planner.workload.sizes import DeviceSizes, SizeTable
from meshwright.program.flops import equation_flops
from meshwright.program.kernels.fused_attention import PLANNED, PLANNED_GRADIENT

_ATTENTION_PRODUCTS = {PLANNED: 2, PLANNED_GRADIENT: 5}
"""Products of queries, keys and values in the two passes."""

_PRODUCTS = {
    "conv_general_dilated": "convolution",
    "dot_general": "product",
    "ragged_dot_general": "product",
}


@dataclass(frozen=True)
class Works:
    """What kernels do on a device, with an element for each of them.

    The kind is a product, a convolution, a pass of attention, a sum of rows, an iteration of a
    loop, or memory that is moved.
    """

    kind: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    times: np.ndarray

    @property
    def in_loop(self) -> np.ndarray:
        """Whether a loop runs it."""
        return self.times > 1

    @cached_property
    def amount(self) -> float:
        """How much all of them do, to compare programs."""
        return float((self.times * (self.flops + self.nbytes)).sum())


class WorkTable:
    """Scheduled kernels as arrays of numbers, so that their work on any mesh is found fast."""

    def __init__(self, kernels: Sequence[Kernel], times: int = 1) -> None:
        rows = _Rows()
        rows.add(kernels, times)
        self._kind, self._times = np.array(rows.kinds, object), np.array(rows.times, int)
        self._computing = np.array([row for row, _, _ in rows.products], int)
        self._flops = np.array([flops for _, flops, _ in rows.products], float)
        self._sharded = SizeTable([array for _, _, array in rows.products])
        self._moving = np.array([move.row for move in rows.moves], int)
        self._passes = np.array([move.passes for move in rows.moves], float)
        copied = [move.copied for move in rows.moves]
        self._moved = SizeTable([move.array for move in rows.moves], copied)
        self._limit = SizeTable([move.limit for move in rows.moves], copied)
        self._choices = rows.choices

    def on(self, sizes: DeviceSizes) -> Works:
        """Return what the kernels do on a device."""
        count = len(self._kind)
        nbytes = np.minimum(self._moved.nbytes(sizes), self._limit.nbytes(sizes))
        moved = np.bincount(self._moving, self._passes * nbytes, count)
        flops = np.zeros(count)
        flops[self._computing] = self._flops * self._sharded.shares(sizes)
        own = Works(self._kind, flops, moved, self._times)
        branches = ([table.on(sizes) for table in tables] for tables in self._choices)
        return _joined([own, *(max(each, key=lambda works: works.amount) for each in branches)])


def _joined(works: Sequence[Works]) -> Works:
    if len(works) == 1:
        return works[0]
    columns = (field.name for field in fields(Works))
    return Works(*(np.concatenate([getattr(each, name) for each in works]) for name in columns))


class _Move(NamedTuple):
    """An array that a kernel reads or writes, this often and up to the size of another."""

    row: int
    passes: int
    array: Array
    limit: Array
    copied: bool = False


class _Rows:
    """The kernels of a program, including those of loops."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.times: list[int] = []
        self.products: list[tuple[int, float, Array]] = []
        self.moves: list[_Move] = []
        self.choices: list[list[WorkTable]] = []

    def add(self, kernels: Sequence[Kernel], times: int) -> None:
        """Add kernels that run so often."""
        for kernel in kernels:
            if kernel.bodies:
                self._add_bodies(kernel, times)
            else:
                self._add_kernel(kernel, times)

    def _add_bodies(self, kernel: Kernel, times: int) -> None:
        if kernel.operation.name == "scan" and kernel.times > 1:
            self._add_row("loop", times * kernel.times)
        if len(kernel.bodies) == 1:
            self.add(kernel.bodies[0], times * kernel.times)
            return
        # Branches are alternatives, and a while loop's condition is small beside its body.
        self.choices.append([WorkTable(body, times * kernel.times) for body in kernel.bodies])

    def _add_kernel(self, kernel: Kernel, times: int) -> None:
        operation = kernel.operation
        if operation.name.startswith(OPAQUE):
            kind, _, part = operation.name.rpartition("_")
            row = self._add_row(kind, times)
            self.products.append((row, *_attention(operation, kind, int(part))))
        elif operation.name in _PRODUCTS:
            row = self._add_row(_PRODUCTS[operation.name], times)
            self.products.append((row, equation_flops(operation.eqn), _operands(operation)))
        else:
            row = self._add_row("sum" if _adds_rows(operation) else "memory", times)
        self.moves += _moves(kernel, row)

    def _add_row(self, kind: str, times: int) -> int:
        self.kinds.append(kind)
        self.times.append(times)
        return len(self.kinds) - 1


def _adds_rows(operation: Operation) -> bool:
    """Whether an operation adds up rows: its result has their last dim."""
    if operation.name != "reduce_sum" or operation.reads[0] is None:
        return False
    last = len(operation.reads[0].dims) - 1
    return last > 0 and last not in operation.eqn.params["axes"]


def _moves(kernel: Kernel, row: int) -> Iterator[_Move]:
    """Yield what a kernel reads and writes."""
    operation = kernel.operation
    if operation.name.startswith("scatter"):
        updates = operation.reads[-1]
        if updates is not None:
            yield _Move(row, 3, updates, updates)
        return
    written = kernel.writes if any(a.nbytes for a in kernel.writes) else operation.writes
    # Only the rows that are looked up are read.
    looks_up = operation.name == "gather"
    for array in written:
        yield _Move(row, 2 if looks_up else 1, array, array)
    if looks_up:
        return
    for array, part in kernel.reads:
        yield _Move(row, 1, array, part)
    for array in kernel.copied:
        yield _Move(row, 2, array, array, copied=True)


def _operands(operation: Operation) -> Array:
    """Return an array with all dims of a product: sharding any of them shards its work."""
    arrays = [a for a in (*operation.reads[:2], *operation.writes[:1]) if a is not None]
    return Array(tuple(dim for array in arrays for dim in array.dims), 1)


def _attention(operation: Operation, kind: str, thousandths: int) -> tuple[float, Array]:
    """Return the operations of attention, and the array that is sharded as they are."""
    query, key = operation.reads[0], operation.reads[1]
    assert query is not None
    assert key is not None
    length = math.prod(factor.size for factor in key.dims[1])
    return 2 * _ATTENTION_PRODUCTS[kind] * query.size * length * thousandths / 1000, query


def seconds_of(
    works: Works, chip: Chip, product_rate: float, times: KernelTimes = KERNEL_TIMES.value
) -> np.ndarray:
    """Return the seconds of one run of each kernel, by the FLOP/s that large products reach."""
    memory = works.nbytes / (chip.hbm_tb_per_s_per_device * 1e12 * chip.hbm_share)
    seconds = np.where(works.kind == "sum", times.row_sum, times.read_once) * memory
    for kind, share in (("product", 1.0), ("convolution", times.convolution)):
        compute = works.flops / (product_rate * times.product * share)
        exposed = times.exposed_traffic * np.minimum(compute, memory)
        seconds = np.where(works.kind == kind, np.maximum(compute, memory) + exposed, seconds)
    shares = {PLANNED: times.attention, PLANNED_GRADIENT: times.attention_gradient}
    for kind, share in shares.items():
        attention = np.maximum(works.flops / (product_rate * share), memory)
        seconds = np.where(works.kind == kind, attention, seconds)
    seconds += chip.launch_us * 1e-6
    iteration = times.iteration if PLATFORMS[chip.platform] == "gpu" else 0.0
    return np.where(works.kind == "loop", iteration, seconds)
