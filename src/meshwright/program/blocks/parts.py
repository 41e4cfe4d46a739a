"""Parts of a program: how each of its outputs is computed, and which are computed alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.program.blocks.differences import is_like, results_of, same_literal
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
)


@dataclass(frozen=True, eq=False)
class Part:
    """How one output of a program is computed.

    Attributes:
        eqns: the equations, in order.
        inputs: the variables from outside that they read, in the order in which they read them.
        output: the output.
    """

    eqns: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    output: Atom

    @property
    def outline(self) -> Hashable:
        """Equal for parts that may be alike."""
        aval = aval_of(self.output)
        return aval.shape, aval.dtype, tuple(eqn.primitive.name for eqn in self.eqns)

    def is_like(self, other: Part) -> bool:
        """Whether both compute the same from their inputs."""
        if self.outline != other.outline or len(self.inputs) != len(other.inputs):
            return False
        own, others = _numbers(self), _numbers(other)

        def same(left: Atom, right: Atom) -> bool:
            if isinstance(left, Literal) or isinstance(right, Literal):
                return same_literal(left, right)
            return own[left] == others[right]

        return same(self.output, other.output) and all(
            is_like(a, b) and all(map(same, a.invars, b.invars))
            for a, b in zip(self.eqns, other.eqns, strict=True)
        )

    def function(self, whole: Jaxpr) -> Callable[..., Any]:
        """Return a function from the inputs to the output; ``whole`` is the part's program."""
        program = whole.replace(
            constvars=[],
            invars=list(self.inputs),
            outvars=[self.output],
            eqns=list(self.eqns),
            debug_info=whole.debug_info.with_unknown_names(),
        )
        closed = ClosedJaxpr(program, ())
        return lambda *inputs: Evaluator([]).run(closed, inputs)[0]


def parts_of(eqns: Sequence[Equation], outputs: Iterable[Atom]) -> list[Part]:
    """Return how each output is computed with these equations."""
    makers = {variable: n for n, eqn in enumerate(eqns) for variable in eqn.outvars}
    return [_part(eqns, makers, output) for output in outputs]


def _part(eqns: Sequence[Equation], makers: dict[Var, int], output: Atom) -> Part:
    needed, waiting = set[int](), [output]
    while waiting:
        atom = waiting.pop()
        number = None if isinstance(atom, Literal) else makers.get(atom)
        if number is not None and number not in needed:
            needed.add(number)
            waiting += eqns[number].invars
    chosen = tuple(eqns[number] for number in sorted(needed))
    read = [*(atom for eqn in chosen for atom in eqn.invars), output]
    outside = [a for a in read if not isinstance(a, Literal) and a not in makers]
    return Part(chosen, tuple(dict.fromkeys(outside)), output)


def _numbers(part: Part) -> dict[Var, int]:
    """Number the variables of a part: the inputs, then the results, in order."""
    return {v: number for number, v in enumerate((*part.inputs, *results_of(part.eqns)))}
