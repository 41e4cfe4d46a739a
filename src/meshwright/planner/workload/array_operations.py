"""A program as operations on arrays: calls replaced by their bodies, loops nested or unrolled."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.program.dims.factors import DimFactor
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import Equation, Literal, name_stack, scan_counts
from meshwright.program.kernels.fused_attention import PLANNED, PLANNED_GRADIENT

LOOPS = ("scan", "while", "cond")
SAME = frozenset(
    {"bitcast_convert_type", "copy", "expand_dims", "name", "optimization_barrier", "reshape",
     "sharding_constraint", "squeeze", "stop_gradient"}
)  # fmt: skip
"""Operations whose result is their operand in memory."""

CASTS = frozenset({"convert_element_type", "reduce_precision"})

OPAQUE = (PLANNED, PLANNED_GRADIENT)
"""Names of calls that stand for one kernel: only their operands and results exist."""


@dataclass(eq=False)
class Array:
    """A value of the program.

    The classes of its dims' factors say along which it can be sharded. ``leaf`` is the number of
    the program's input that it is, ``gradient`` that of the input whose gradient it is, ``cast_of``
    that of the input whose rows a loop has cast and saved in it. It may be one row of a stack that
    a loop runs over (``of_row``).
    """

    dims: tuple[tuple[DimFactor, ...], ...]
    itemsize: int
    leaf: int | None = None
    of_weights: bool = False
    of_row: bool = False
    gradient: int | None = None
    cast_of: int | None = None

    @cached_property
    def classes(self) -> frozenset[int]:
        """The classes of its dims."""
        return frozenset(factor.id for dim in self.dims for factor in dim)

    @cached_property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(factor.size for dim in self.dims for factor in dim)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size * self.itemsize


@dataclass(eq=False)
class Operation:
    """An equation, or a loop whose bodies run so many times; operands are None for literals."""

    name: str
    eqn: Equation
    reads: list[Array | None]
    writes: list[Array]
    bodies: list[Operations] = field(default_factory=list["Operations"])
    times: int = 1
    backward: bool = False


@dataclass(eq=False)
class Operations:
    """A program; outputs are None for literals."""

    traced: ProgramDims
    inputs: list[Array]
    operations: list[Operation]
    outputs: list[Array | None]


def list_operations(traced: ProgramDims, weights: Collection[int] = ()) -> Operations:
    """Return the operations of a traced program, some of whose inputs are weights."""
    inputs = [_array(traced, v) for v in traced.jaxpr.invars]
    for number in weights:
        inputs[number].leaf, inputs[number].of_weights = number, True
    return _program(traced, inputs)


def _program(traced: ProgramDims, inputs: list[Array]) -> Operations:
    operations: list[Operation] = []
    outputs = _inline(traced, inputs, operations)
    return Operations(traced, inputs, _needed(operations, outputs), outputs)


def _inline(
    traced: ProgramDims, arguments: Sequence[Array | None], operations: list[Operation]
) -> list[Array | None]:
    """Add the operations of a program, with calls replaced by their bodies; return its results."""
    jaxpr = traced.jaxpr
    values: dict[Any, Array | None] = dict(zip(jaxpr.invars, arguments, strict=True))
    values.update({v: _array(traced, v) for v in jaxpr.constvars})

    def read(atom: Any) -> Array | None:
        return None if isinstance(atom, Literal) else values[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        reads = [read(atom) for atom in eqn.invars]
        called = traced.calls.get(number, ())
        opaque = str(eqn.params.get("name", "")).startswith(OPAQUE)
        if called and name not in LOOPS and not opaque:
            results = _inline(called[0], reads, operations)
            values.update(
                (v, _array(traced, v) if r is None else r)
                for v, r in zip(eqn.outvars, results, strict=True)
            )
            continue
        writes = [_array(traced, v) for v in eqn.outvars]
        weights = [r for r in reads if r is not None]
        of_weights = bool(weights) and all(r.of_weights for r in weights)
        for array in writes:
            array.of_weights = of_weights
        if name in SAME and reads[0] is not None:
            writes[0].leaf, writes[0].of_row = reads[0].leaf, reads[0].of_row
        operation = Operation(
            eqn.params["name"] if opaque else name,
            eqn,
            reads,
            writes,
            backward="transpose(" in name_stack(eqn) or "rematted" in name_stack(eqn),
        )
        if called and not opaque:
            _add_bodies(operation, called)
        operations.append(operation)
        values.update(zip(eqn.outvars, writes, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _add_bodies(operation: Operation, called: Sequence[ProgramDims]) -> None:
    eqn = operation.eqn
    for traced in called:
        body_inputs = [_array(traced, v) for v in traced.jaxpr.invars]
        if operation.name == "scan":
            for outer, inner in zip(operation.reads, body_inputs, strict=True):
                inner.of_weights = outer is not None and outer.of_weights
                inner.leaf = None if outer is None else outer.leaf
            consts, carries = scan_counts(eqn)
            for inner in body_inputs[consts : consts + carries]:
                inner.of_weights, inner.leaf = False, None
            for inner in body_inputs[consts + carries :]:
                inner.of_row = True
        operation.bodies.append(_program(traced, body_inputs))
    if operation.name == "scan":
        operation.times = eqn.params["length"]
        (body,) = operation.bodies
        carries = scan_counts(eqn)[1]
        for written, row in zip(operation.writes[carries:], body.outputs[carries:], strict=True):
            written.cast_of = _cast_leaf(body, row)


def _cast_leaf(body: Operations, row: Array | None) -> int | None:
    """Return the leaf of which a result of a loop's body is a cast, before it is gathered."""
    makers = {id(op.writes[0]): op for op in body.operations if op.name in CASTS}
    while row is not None and row.leaf is None and id(row) in makers:
        row = makers[id(row)].reads[0]
    return None if row is None else row.leaf


def _needed(operations: Sequence[Operation], outputs: Iterable[Array | None]) -> list[Operation]:
    """Return the operations that outputs depend on."""
    wanted = {id(array) for array in outputs}
    kept: list[Operation] = []
    for operation in reversed(operations):
        if any(id(array) in wanted for array in operation.writes):
            kept.append(operation)
            wanted.update(id(array) for array in operation.reads)
    return kept[::-1]


def _array(traced: ProgramDims, variable: Any) -> Array:
    dtype = getattr(variable.aval, "dtype", None)
    return Array(traced.dims(variable), getattr(dtype, "itemsize", 4))


_ROWWISE = SAME - {"bitcast_convert_type", "expand_dims", "reshape", "squeeze"}
"""Operations whose result has the same rows as their operand."""


def unroll(program: Operations) -> tuple[Operations, list[list[Array]]]:
    """Replace each scan of a program by its iterations; return also the rows of each result."""
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

    def run(self) -> tuple[Operations, list[list[Array]]]:
        for operation in self._program.operations:
            if operation.name == "scan" and operation.times > 1:
                self._expand(operation)
            elif not self._keeps_rows(operation):
                reads = [self._read(array) for array in operation.reads]
                self._operations.append(replace(operation, reads=reads))
        outputs = [
            [] if a is None else self._rows.get(id(a)) or [self._values.get(id(a), a)]
            for a in self._program.outputs
        ]
        flat = [array for arrays in outputs for array in arrays]
        made = Operations(self._program.traced, self._inputs, self._operations, [*flat])
        return made, outputs

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
