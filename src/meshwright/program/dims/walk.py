"""The walk over a traced program, which gives every variable its dims and records events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from meshwright.program.dims import calls, contractions, elementwise, reduce, shape, slicing
from meshwright.program.dims.atoms import Atom, Dims, Factors, atoms
from meshwright.program.dims.op import Log, Op, Rule, Value, is_inexact, shape_of, unknown
from meshwright.program.jaxpr.equations import Equation, Jaxpr, Literal, Var, name_stack
from meshwright.program.jaxpr.names import module_of

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **contractions.RULES,
    **shape.RULES,
    **slicing.RULES,
    **reduce.RULES,
}


@dataclass(slots=True)
class Frame:
    """One call of one jaxpr: the dims of its variables there.

    Attributes:
        jaxpr: the program that is called.
        path: the module the call belongs to; empty if unknown.
        times: how often the surrounding loops run it.
        calls: by equation number, the frames of the programs the equation calls: condition and
            body of a while loop, the branches of a cond, one for other calls.
        noted: by equation number, the numbers of its events, inner programs included.
    """

    jaxpr: Jaxpr
    path: str
    times: int
    calls: dict[int, tuple[Frame, ...]] = field(default_factory=dict[int, "tuple[Frame, ...]"])
    noted: dict[int, range] = field(default_factory=dict[int, range])
    values: dict[Var, Value] = field(default_factory=dict[Var, Value], repr=False)

    def dims(self, variable: Var) -> tuple[tuple[Atom, ...], ...]:
        """Return the atoms of each dim of a variable of this jaxpr, major first."""
        return tuple(atoms(dim) for dim in self.values[variable].dims)


def all_frames(frame: Frame) -> Iterator[Frame]:
    """Yield a frame and every frame called from it."""
    yield frame
    for inner in frame.calls.values():
        for called in inner:
            yield from all_frames(called)


class Walk:
    """Walks programs and writes one log."""

    def __init__(self) -> None:
        self.factors = Factors()
        self.log = Log()
        self._sources = count()

    def input(
        self, aval: Any, *, leaf: int | None = None, trained: bool = False, has_data: bool = False
    ) -> Value:
        """Return a new value: a parameter, trained or not, data, or neither."""
        return Value(
            dims=self.factors.dims(shape_of(aval)),
            params=frozenset() if leaf is None else frozenset([leaf]),
            has_data=has_data,
            has_grad=trained and is_inexact(aval),
            source=next(self._sources),
        )

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[Value], path: str = "", times: int = 1
    ) -> tuple[Frame, list[Value]]:
        """Walk a program; return its frame and its results."""
        frame = Frame(jaxpr, path, times)
        frame.values.update(zip(jaxpr.invars, arguments, strict=True))
        for variable in jaxpr.constvars:
            frame.values[variable] = self.input(variable.aval)
        for number, equation in enumerate(jaxpr.eqns):
            start = len(self.log.events)
            results = self._equation(frame, number, equation)
            if len(self.log.events) > start:
                frame.noted[number] = range(start, len(self.log.events))
            frame.values.update(zip(equation.outvars, results, strict=True))
        return frame, [self._read(frame, atom) for atom in jaxpr.outvars]

    def _read(self, frame: Frame, atom: Any) -> Value:
        return self.input(atom.aval) if isinstance(atom, Literal) else frame.values[atom]

    def _equation(self, frame: Frame, number: int, equation: Equation) -> list[Value]:
        op = Op(
            equation=equation,
            operands=[self._read(frame, atom) for atom in equation.invars],
            path=module_of(name_stack(equation)) or frame.path,
            times=frame.times,
            factors=self.factors,
            log=self.log,
        )
        rule = RULES.get(op.name)
        if rule is not None:
            return self._results(op, rule(op))
        call = calls.RULES.get(op.name) or (calls.call if calls.body_of(op) else None)
        if call is None:
            return self._results(op, unknown(op))
        return self._call(frame, number, op, call)

    def _call(self, frame: Frame, number: int, op: Op, rule: calls.CallRule) -> list[Value]:
        def enter(jaxpr: Jaxpr, arguments: Sequence[Value], times: int) -> list[Value]:
            inner, results = self.run(jaxpr, arguments, op.path, op.times * times)
            frame.calls[number] = (*frame.calls.get(number, ()), inner)
            return results

        return rule(op, enter)

    def _results(self, op: Op, dims: Sequence[Dims]) -> list[Value]:
        has_data = any(value.has_data for value in op.operands)
        has_grad = op.name != "stop_gradient" and any(value.has_grad for value in op.operands)
        params = frozenset[int]().union(*(value.params for value in op.operands))
        return [
            Value(
                dims=result_dims,
                params=frozenset() if has_data else params,
                has_data=has_data,
                has_grad=has_grad and is_inexact(aval),
                source=self._source(op, position),
            )
            for position, (result_dims, aval) in enumerate(zip(dims, op.out_avals, strict=True))
        ]

    def _source(self, op: Op, position: int) -> int:
        if op.name in elementwise.SAME_NUMBERS:
            return op.operands[min(position, len(op.operands) - 1)].source
        return next(self._sources)
