"""The walk over a traced program, which gives every variable its dims and records events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from meshwright.program.dims import calls, contractions, elementwise, reduce, shape, slicing
from meshwright.program.dims.factors import DimFactor, Dims, Factors, factors_of
from meshwright.program.dims.op import Log, Op, Rule, Value, is_inexact, shape_of, unknown
from meshwright.program.jaxpr.equations import Atom, Equation, Jaxpr, Literal, Var, equation_module

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **contractions.RULES,
    **shape.RULES,
    **slicing.RULES,
    **reduce.RULES,
}


@dataclass(slots=True)
class ProgramDims:
    """The dims of a program's variables, in one call of it.

    Attributes:
        path: the module the call belongs to; empty if unknown.
        times: how often the surrounding loops run it.
        calls: by equation number, the programs that the equation calls: condition and
            body of a while loop, the branches of a cond, one for other calls.
        noted: by equation number, the numbers of its events, inner programs included.
    """

    jaxpr: Jaxpr
    path: str
    times: int
    calls: dict[int, tuple[ProgramDims, ...]] = field(
        default_factory=dict[int, "tuple[ProgramDims, ...]"]
    )
    noted: dict[int, range] = field(default_factory=dict[int, range])
    values: dict[Var, Value] = field(default_factory=dict[Var, Value], repr=False)

    def dims(self, atom: Atom) -> tuple[tuple[DimFactor, ...], ...]:
        """Return the factors of each dim of a variable, major first; nothing of a constant."""
        known = () if isinstance(atom, Literal) else self.values[atom].dims
        return tuple(factors_of(dim) for dim in known)


def all_programs(program: ProgramDims) -> Iterator[ProgramDims]:
    """Yield a program and every program that is called from it."""
    yield program
    for inner in program.calls.values():
        for called in inner:
            yield from all_programs(called)


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
    ) -> tuple[ProgramDims, list[Value]]:
        """Walk a program; return the dims of its variables, and its results."""
        program = ProgramDims(jaxpr, path, times)
        program.values.update(zip(jaxpr.invars, arguments, strict=True))
        for variable in jaxpr.constvars:
            program.values[variable] = self.input(variable.aval)
        for number, equation in enumerate(jaxpr.eqns):
            start = len(self.log.events)
            results = self._equation(program, number, equation)
            if len(self.log.events) > start:
                program.noted[number] = range(start, len(self.log.events))
            program.values.update(zip(equation.outvars, results, strict=True))
        return program, [self._read(program, atom) for atom in jaxpr.outvars]

    def _read(self, program: ProgramDims, atom: Any) -> Value:
        return self.input(atom.aval) if isinstance(atom, Literal) else program.values[atom]

    def _equation(self, program: ProgramDims, number: int, equation: Equation) -> list[Value]:
        op = Op(
            equation=equation,
            operands=[self._read(program, atom) for atom in equation.invars],
            path=equation_module(equation) or program.path,
            times=program.times,
            factors=self.factors,
            log=self.log,
        )
        rule = RULES.get(op.name)
        if rule is not None:
            return self._results(op, rule(op))
        call = calls.RULES.get(op.name) or (calls.call if calls.body_of(op) else None)
        if call is None:
            return self._results(op, unknown(op))
        return self._call(program, number, op, call)

    def _call(self, program: ProgramDims, number: int, op: Op, rule: calls.CallRule) -> list[Value]:
        def enter(jaxpr: Jaxpr, arguments: Sequence[Value], times: int) -> list[Value]:
            inner, results = self.run(jaxpr, arguments, op.path, op.times * times)
            program.calls[number] = (*program.calls.get(number, ()), inner)
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
