"""A program whose loops over repeated blocks run block by block, made from one with loops.

Gradients of a loop are traced once for all blocks, those of single blocks once for each: for deep
models that takes most of the time of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.planner.workload.array_operations import SAME, Array, Operation, Operations
from meshwright.program.jaxpr.equations import scan_counts

_ROWWISE = SAME - {"bitcast_convert_type", "expand_dims", "reshape", "squeeze"}
"""Operations whose result has the same rows as their operand."""


@dataclass(frozen=True)
class Unrolled:
    """A program without loops over blocks.

    ``outputs`` are, for each result of the program with loops, its rows or the result itself.
    """

    program: Operations
    outputs: list[list[Array]]


def unroll(program: Operations) -> Unrolled:
    """Replace each scan of a program by its iterations."""
    return _Unrolling(program).run()


class _Unrolling:
    def __init__(self, program: Operations) -> None:
        self._program = program
        self._inputs = list(program.inputs)
        self._arguments = {id(array) for array in program.inputs}
        self._operations: list[Operation] = []
        self._values: dict[int, Array] = {}
        self._rows: dict[int, list[Array]] = {}
        self._scans: dict[int, Operation] = {}
        self._cut: dict[tuple[int, int], Array] = {}

    def run(self) -> Unrolled:
        for operation in self._program.operations:
            if operation.name == "scan" and operation.times > 1:
                self._expand(operation)
            elif not self._keeps_rows(operation):
                reads = [self._read(array) for array in operation.reads]
                self._operations.append(replace(operation, reads=reads))
        outputs = [[] if a is None else self._results(a) for a in self._program.outputs]
        flat = [array for arrays in outputs for array in arrays]
        made = Operations(self._program.traced, self._inputs, self._operations, [*flat])
        return Unrolled(made, outputs)

    def _results(self, array: Array) -> list[Array]:
        return self._rows.get(id(array)) or [self._values.get(id(array), array)]

    def _keeps_rows(self, operation: Operation) -> bool:
        """Whether an operation only passes on rows that loops have written."""
        pairs = list(zip(operation.reads, operation.writes, strict=False))
        if operation.name not in _ROWWISE or not any(id(old) in self._rows for old, _ in pairs):
            return False
        for old, new in pairs:
            if id(old) in self._rows:
                self._rows[id(new)] = self._rows[id(old)]
                self._scans[id(new)] = self._scans[id(old)]
            elif old is not None:
                self._values[id(new)] = self._values.get(id(old), old)
        return True

    def _read(self, array: Array | None) -> Array | None:
        """Return the array that an operation outside of loops reads."""
        if array is None:
            return None
        if id(array) in self._rows and id(array) not in self._values:
            scan = self._scans[id(array)]
            rows = self._rows[id(array)]
            joined = Operation("concatenate", scan.eqn, [*rows], [array], backward=scan.backward)
            self._operations.append(joined)
            self._values[id(array)] = array
        return self._values.get(id(array), array)

    def _expand(self, scan: Operation) -> None:
        consts, carries = scan_counts(scan.eqn)
        body = scan.bodies[0]
        given = [self._read(array) for array in scan.reads[: consts + carries]]
        constants = given[:consts]
        carried = [
            _copy(inner) if outer is None else outer
            for outer, inner in zip(given[consts:], body.inputs[consts:], strict=False)
        ]
        stacks = scan.reads[consts + carries :]
        rows: list[list[Array]] = [[] for _ in body.outputs[carries:]]
        for number in range(scan.times):
            row = scan.times - 1 - number if scan.eqn.params["reverse"] else number
            cut = [
                self._row(stack, row, inner, scan)
                for stack, inner in zip(stacks, body.inputs[consts + carries :], strict=True)
            ]
            found = self._iteration(scan, body, [*constants, *carried, *cut])
            carried = found[:carries]
            for own, array in zip(rows, found[carries:], strict=True):
                own.append(array)
        self._values.update(
            {id(array): last for array, last in zip(scan.writes[:carries], carried, strict=True)}
        )
        for array, own in zip(scan.writes[carries:], rows, strict=True):
            self._rows[id(array)] = own[::-1] if scan.eqn.params["reverse"] else own
            self._scans[id(array)] = scan

    def _row(self, stack: Array | None, row: int, inner: Array, scan: Operation) -> Array:
        """Return one row of a stack, the same one for every loop that reads it."""
        if stack is None:
            return _copy(inner)
        if id(stack) in self._rows:
            return self._rows[id(stack)][row]
        source = self._values.get(id(stack), stack)
        key = (id(source), row)
        if key not in self._cut:
            own = self._cut[key] = _copy(inner)
            if id(source) in self._arguments:
                self._inputs.append(own)
            else:
                taken = Operation("slice", scan.eqn, [source], [own], backward=scan.backward)
                self._operations.append(taken)
        return self._cut[key]

    def _iteration(
        self, scan: Operation, body: Operations, given: Sequence[Array | None]
    ) -> list[Array]:
        """Add the operations of one iteration and return its results."""
        values = {
            id(inner): _copy(inner) if outer is None else outer
            for inner, outer in zip(body.inputs, given, strict=True)
        }
        for operation in body.operations:
            writes = [_copy(array) for array in operation.writes]
            reads = [None if a is None else values.get(id(a), a) for a in operation.reads]
            made = replace(operation, reads=reads, writes=writes, backward=scan.backward)
            self._operations.append(made)
            values.update({id(old): new for old, new in zip(operation.writes, writes, strict=True)})
        return [
            _copy(like) if array is None else values.get(id(array), array)
            for array, like in zip(body.outputs, _results_like(scan, body), strict=True)
        ]


def _results_like(scan: Operation, body: Operations) -> list[Array]:
    """Return an array of the size of each result of an iteration, for results that are literals."""
    known = [array for array in body.outputs if array is not None]
    fallback = known[0] if known else scan.writes[0]
    return [fallback if array is None else array for array in body.outputs]


def _copy(array: Array) -> Array:
    return Array(array.dims, array.itemsize, array.leaf, array.of_weights)
