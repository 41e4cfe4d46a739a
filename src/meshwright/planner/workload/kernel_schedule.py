"""The kernels that a compiler makes of a program, and how long each array is in memory.

Operations that compilers fuse into whatever reads their result write nothing; what they read is
read where their result is. The order is that of the program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.pipeline.execute.least_saved import CHEAP
from meshwright.planner.workload.array_operations import SAME, Array, Operation, Operations
from meshwright.planner.workload.gpu_rules import FILLED_DIMS, PRODUCTS_STAY
from meshwright.program.jaxpr.equations import scan_counts

_FUSED = CHEAP | {
    "dynamic_slice", "random_bits", "random_fold_in", "random_seed", "random_unwrap", "random_wrap",
    "threefry2x32"
}  # fmt: skip

_SLICES = frozenset({"dynamic_slice", "slice", "split"})
"""Operations that read a part of their operand."""

_REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
     "reduce_sum"}
)  # fmt: skip
"""Operations that compute what they read while they read it."""

_ROUNDS = frozenset({"reduce_precision"})
"""How checkpoints mark the values that they save."""

Sources = Mapping[int, tuple[Array, Array]]
"""The arrays that something reads, and those whose sizes say how much of each, by id."""


@dataclass(eq=False)
class Kernel:
    """Something that runs on the device, and what is in memory meanwhile.

    With each array that it reads comes the array whose size says how much of it. Its results take
    over the memory of ``reused`` arrays. Weights that are gathered and rows of a loop are
    ``copied`` for it; nobody reads ``freed`` arrays and ``released`` copies afterwards.
    """

    operation: Operation
    reads: list[tuple[Array, Array]]
    writes: list[Array]
    reused: list[Array] = field(default_factory=list[Array])
    freed: list[Array] = field(default_factory=list[Array])
    copied: list[Array] = field(default_factory=list[Array])
    released: list[Array] = field(default_factory=list[Array])
    bodies: list[list[Kernel]] = field(default_factory=list["list[Kernel]"])
    times: int = 1


def schedule(
    program: Operations, platform: str, rows: Collection[Array] | None = None
) -> list[Kernel]:
    """Return the kernels of a program, in order.

    For the body of a loop, ``rows`` are its inputs that are rows of larger arrays; its results are
    written into arrays that the loop has allocated.
    """
    return _Scheduler(program, platform, rows).kernels()


class _Scheduler:
    def __init__(self, program: Operations, platform: str, rows: Collection[Array] | None) -> None:
        self._platform, self._in_loop = platform, rows is not None
        self._rows = {id(array) for array in rows or ()}
        self._same: dict[int, Array] = {}
        self._saved: dict[tuple[object, ...], Array] = {}
        self._operations = [op for op in program.operations if not self._is_same(op)]
        for operation in self._operations:
            self._same |= _written_twice(operation)
        self._readers: dict[int, list[Operation]] = {}
        for operation in self._operations:
            for array in operation.reads:
                if array is not None:
                    self._readers.setdefault(id(self._find(array)), []).append(operation)
        outputs = [self._find(array) for array in program.outputs if array is not None]
        self._outputs = {id(array) for array in outputs}
        self._inputs = {id(array) for array in program.inputs}
        products = (op for op in self._operations if op.name == "dot_general")
        self._products = {id(array) for op in products for array in op.writes}

    def kernels(self) -> list[Kernel]:
        stored, sources = set(self._inputs), dict[int, Sources]()
        kernels: list[Kernel] = []
        for operation in self._operations:
            read = self._sources(operation, sources, stored)
            writes = [a for a in operation.writes if self._is_stored(operation, a, read)]
            stored |= {id(array) for array in writes}
            for array in operation.writes:
                if id(array) not in stored:
                    sources[id(array)] = read
            if writes or operation.name not in _FUSED:
                kernels.append(self._kernel(operation, read, writes))
        self._end_lives(kernels)
        return kernels

    def _is_same(self, operation: Operation) -> bool:
        """Whether all results are arrays that exist already, which is noted."""
        reads = operation.reads
        if operation.name in SAME and reads[0] is not None:
            pairs = zip(reads, operation.writes, strict=False)
            self._same.update({id(new): old for old, new in pairs if old is not None})
            return True
        if operation.name not in _ROUNDS or reads[0] is None:
            return False
        # The rule SAVED_ONCE: several products read the same rounded values.
        (result,) = operation.writes
        key = (id(self._find(reads[0])), operation.backward, str(operation.eqn.params))
        first = self._saved.setdefault(key, result)
        if first is result:
            return False
        self._same[id(result)] = first
        return True

    def _find(self, array: Array) -> Array:
        while id(array) in self._same:
            array = self._same[id(array)]
        return array

    def _is_stored(self, operation: Operation, array: Array, read: Sources) -> bool:
        """Whether a result is written to memory, and not into whatever reads it."""
        if id(array) in self._same:
            return False
        if operation.name not in _FUSED or id(array) in self._outputs:
            return True
        readers = {id(reader): reader for reader in self._readers.get(id(array), [])}
        direct = [reader for reader in readers.values() if _needs_array(reader)]
        if array.of_weights and all(reader.name == "scan" for reader in direct):
            # Loops read the rows of a weight and cast them.
            direct = []
        if direct:
            return True
        if len(readers) < 2:
            return False
        # The rule RECOMPUTED_SUMS, for operands that are about as large as the result.
        large = sum(2 * whole.nbytes >= array.nbytes for whole, _ in read.values())
        return large * len(readers) > large + 1 + len(readers)

    def _sources(
        self, operation: Operation, known: Mapping[int, Sources], stored: Collection[int]
    ) -> Sources:
        """Return the stored arrays that an operation reads, and how much of each."""
        found: dict[int, tuple[Array, Array]] = {}
        for operand in operation.reads:
            if operand is None:
                continue
            array = self._find(operand)
            if id(array) in stored:
                found.setdefault(id(array), (array, array))
            else:
                for key, source in known.get(id(array), {}).items():
                    found.setdefault(key, source)
        if operation.name in _SLICES and operation.writes:
            return {key: (array, operation.writes[0]) for key, (array, _) in found.items()}
        return found

    def _kernel(self, operation: Operation, read: Sources, writes: list[Array]) -> Kernel:
        kernel = Kernel(operation, list(read.values()), writes, times=operation.times)
        rows: list[Array] | None = None
        for body in operation.bodies:
            if operation.name == "scan":
                rows = body.inputs[sum(scan_counts(operation.eqn)) :]
            elif operation.name == "while":
                rows = []
            kernel.bodies.append(schedule(body, self._platform, rows))
        return kernel

    def _end_lives(self, kernels: Sequence[Kernel]) -> None:
        """Note where arrays are freed, and whose memory is reused."""
        last: dict[int, int] = {}
        arrays: dict[int, Array] = {}
        for time, kernel in enumerate(kernels):
            for array in (*kernel.writes, *(array for array, _ in kernel.reads)):
                last[id(array)], arrays[id(array)] = time, array
        for key in dict.fromkeys(id(array) for kernel in kernels for array in kernel.writes):
            if self._in_loop or key not in self._outputs:
                kernels[last[key]].freed.append(arrays[key])
        for kernel in kernels:
            if self._in_loop and kernel.operation.name in _FUSED:
                self._write_into_loop(kernel)
            self._reuse(kernel)
        self._copy_inputs(kernels)

    def _write_into_loop(self, kernel: Kernel) -> None:
        """Leave out results that are written where the loop stores them, and read by nobody."""
        ended = {id(array) for array in kernel.freed}
        direct = {id(a) for a in kernel.writes if id(a) in self._outputs and id(a) in ended}
        kernel.writes = [array for array in kernel.writes if id(array) not in direct]
        kernel.freed = [array for array in kernel.freed if id(array) not in direct]

    def _reuse(self, kernel: Kernel) -> None:
        """Let results take over the memory of what is read for the last time."""
        operation = kernel.operation
        if operation.name == "scan":
            consts, carries = scan_counts(operation.eqn)
            carried = operation.reads[consts : consts + carries]
            keys = {id(self._find(array)) for array in carried if array is not None}
            kernel.reused = [array for array in kernel.freed if id(array) in keys]
        elif operation.name in _FUSED:
            for result in kernel.writes:
                match = [a for a in kernel.freed if self._can_replace(result, a)]
                kernel.reused += match[:1]
        kernel.freed = [array for array in kernel.freed if array not in kernel.reused]

    def _can_replace(self, result: Array, array: Array) -> bool:
        if result is array or result.nbytes != array.nbytes:
            return False
        if PRODUCTS_STAY.on(self._platform) and id(array) in self._products:
            return False
        return not self._is_filled(result)

    def _is_filled(self, array: Array) -> bool:
        """Whether a product reads a copy of an array, with its last dim filled up."""
        if not FILLED_DIMS.on(self._platform) or array.itemsize > 2 or not array.dims:
            return False
        rest = math.prod(factor.size for factor in array.dims[-1]) % FILLED_DIMS.value
        readers = self._readers.get(id(self._find(array)), [])
        return rest > 0 and any(operation.name == "dot_general" for operation in readers)

    def _copy_inputs(self, kernels: Sequence[Kernel]) -> None:
        """Note where weights are gathered and rows of a loop copied, once for each pass."""
        spans: dict[tuple[int, bool], tuple[Array, int, int]] = {}
        for time, kernel in enumerate(kernels):
            if kernel.bodies or not _needs_array(kernel.operation):
                continue
            for array, _ in kernel.reads:
                if array.leaf is None and id(array) not in self._rows:
                    continue
                if id(array) in self._inputs:
                    key = (id(array), kernel.operation.backward)
                    first = spans[key][1] if key in spans else time
                    spans[key] = (array, first, time)
        for array, first, final in spans.values():
            kernels[first].copied.append(array)
            kernels[final].released.append(array)


def _written_twice(operation: Operation) -> dict[int, Array]:
    """Return the results of a loop that hold the same values as an earlier one, and which."""
    if operation.name != "scan":
        return {}
    (body,) = operation.bodies
    makers = {id(o.writes[0]): o for o in body.operations if o.name in SAME | _ROUNDS}
    found: dict[int, Array] = {}
    first: dict[tuple[object, ...], Array] = {}
    carries = scan_counts(operation.eqn)[1]
    for value, result in zip(body.outputs[carries:], operation.writes[carries:], strict=True):
        if value is None:
            continue
        rounded = list[str]()
        while (made := makers.get(id(value))) is not None and made.reads[0] is not None:
            rounded += [str(made.eqn.params)] if made.name in _ROUNDS else []
            value = made.reads[0]
        if first.setdefault((id(value), *rounded), result) is not result:
            found[id(result)] = first[id(value), *rounded]
    return found


def _needs_array(operation: Operation) -> bool:
    return operation.name not in _FUSED and operation.name not in _REDUCTIONS
