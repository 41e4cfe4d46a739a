"""Which weights the backward pass reads: not those that are only added or multiply data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.program.jaxpr.equations import (
    CALLS,
    REARRANGES,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    scan_counts,
)
from meshwright.program.trace.traced_loss import TracedLoss

_BILINEAR = frozenset({"dot_general", "conv_general_dilated", "mul"})
_LINEAR = frozenset({"add", "add_any", "sub", "neg", "concatenate", "reduce_sum", "gather"})
_ENTERED = CALLS | {"custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}


@dataclass(frozen=True)
class _Mark:
    """What is known about a value.

    Attributes:
        trained: whether it depends on trained leaves, so that a gradient flows back to it.
        weights: numbers of the leaves it is, if it is only a rearranged leaf.
    """

    trained: bool = False
    weights: frozenset[int] = frozenset()


_DATA = _Mark()


def weights_in_backward(traced: TracedLoss) -> frozenset[int]:
    """Return the numbers of the step leaves whose values the backward pass reads.

    The gradient of x·W needs W only if x has a gradient; that of x + b never needs b.
    """
    leaves = traced.layout.step_leaves
    marks = [
        _Mark(
            step.leaf.role == "param", frozenset({number}) if step.leaf.is_weight else frozenset()
        )
        for number, step in enumerate(leaves)
    ]
    walk = _Walk()
    walk.program(traced.closed.jaxpr, [*marks, *[_DATA] * len(traced.batch)])
    return frozenset(walk.weights_read)


class _Walk:
    """Follows values through a program and collects the weights that its derivative reads."""

    def __init__(self) -> None:
        self.weights_read: set[int] = set()

    def program(self, jaxpr: Jaxpr, marks: Sequence[_Mark]) -> list[_Mark]:
        """Return the marks of a program's results."""
        known: dict[Var, _Mark] = dict(zip(jaxpr.invars, marks, strict=True))

        def of(atom: Var | Literal) -> _Mark:
            return _DATA if isinstance(atom, Literal) else known.get(atom, _DATA)

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [of(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Equation, marks: list[_Mark]) -> list[_Mark]:
        name = eqn.primitive.name
        if name in _ENTERED:
            return self.program(called_jaxpr(eqn).jaxpr, marks)
        if name == "scan":
            return self._scan(eqn, marks)
        if name in REARRANGES or name == "convert_element_type":
            return [marks[0]]
        trained = any(mark.trained for mark in marks)
        if name in _BILINEAR:
            self._product(*marks)
        elif name not in _LINEAR and trained:
            for mark in marks:
                self.weights_read |= mark.weights
        return [_Mark(trained)] * len(eqn.outvars)

    def _product(self, left: _Mark, right: _Mark) -> None:
        if right.trained:
            self.weights_read |= left.weights
        if left.trained:
            self.weights_read |= right.weights

    def _scan(self, eqn: Equation, marks: list[_Mark]) -> list[_Mark]:
        closed: ClosedJaxpr = eqn.params["jaxpr"]
        num_consts, num_carry = scan_counts(eqn)
        carries = slice(num_consts, num_consts + num_carry)
        while True:
            results = self.program(closed.jaxpr, marks)
            after = [
                _Mark(before.trained or result.trained)
                for before, result in zip(marks[carries], results[:num_carry], strict=True)
            ]
            if after == marks[carries]:
                return results
            marks = [*marks[:num_consts], *after, *marks[carries.stop :]]
