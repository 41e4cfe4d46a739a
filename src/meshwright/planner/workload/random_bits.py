"""What CPUs keep in memory for random bits, which GPUs compute where they are read.

Each element has two words, made from two counters; both words are kept, and joined by whatever
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.planner.workload.array_operations import Array, Operation
from meshwright.planner.workload.kernel import Kernel

_NAME = "random_bits"


def second_words(operations: Iterable[Operation]) -> dict[int, Array]:
    """Return the second words of random bits, by the id of the array that stands for the first."""
    arrays = [operation.writes[0] for operation in operations if operation.name == _NAME]
    return {id(array): Array(array.dims, array.itemsize) for array in arrays}


def add_counters(kernels: Sequence[Kernel]) -> None:
    """Add the counters of random bits to a program: two of each shape, for all of its loops."""
    spans: dict[object, tuple[Array, int, int]] = {}
    for time, kernel in enumerate(kernels):
        for array in _random_bits(kernel.operation):
            shape = (array.dims, array.itemsize)
            spans[shape] = (array, spans[shape][1] if shape in spans else time, time)
    for array, first, last in spans.values():
        counters = [Array(array.dims, array.itemsize) for _ in range(2)]
        kernels[first].writes += counters
        kernels[last].freed += counters


def _random_bits(operation: Operation) -> Iterator[Array]:
    if operation.name == _NAME:
        yield operation.writes[0]
    for body in operation.bodies:
        for inner in body.operations:
            yield from _random_bits(inner)
