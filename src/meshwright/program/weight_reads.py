"""Where a program reads its trained weights: by which operation, in which module, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.program.jaxpr.equations import (
    CALLS,
    REARRANGES,
    REMATS,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    called_jaxpr,
    name_stack,
    scan_counts,
)
from meshwright.program.jaxpr.names import module_of
from meshwright.program.trace.traced_loss import TracedLoss

_ENTERED = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call"}


@dataclass(frozen=True)
class WeightRead:
    """One equation in which a weight meets data: its gradient is a sum over samples.

    Attributes:
        leaf: the number of the step leaf.
        operation: the primitive.
        module: the module it is in.
        iterations: how often loops run it with the same weight.
        sizes: bytes of the weight, and of what is computed from it alone before it is read.
        through: the modules in which that is computed.
    """

    leaf: int
    operation: str
    module: str
    iterations: int
    sizes: frozenset[int]
    through: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Held:
    """What a value depends on.

    Attributes:
        leaves: the weights that it consists of; empty if it depends on data.
        sizes: the bytes that these have had on the way.
        through: the modules on the way.
        data: whether it depends on data.
    """

    leaves: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()
    through: frozenset[str] = frozenset()
    data: bool = False


_CONSTANT = _Held()
_DATA = _Held(data=True)


def weight_reads(traced: TracedLoss) -> list[WeightRead]:
    """Return every read of a trained weight, in the order of the program."""
    held = [
        _Held(frozenset({number}), frozenset({step.leaf.nbytes}))
        if step.leaf.role == "param"
        else _DATA
        for number, step in enumerate(traced.layout.step_leaves)
    ]
    walk = _Walk([])
    walk.program(traced.closed.jaxpr, [*held, *[_DATA] * len(traced.batch)], "", 1)
    return walk.reads


@dataclass(frozen=True)
class _Walk:
    """Follows weights through a program, and notes where they meet data."""

    reads: list[WeightRead]

    def program(
        self, jaxpr: Jaxpr, held: Sequence[_Held], module: str, iterations: int
    ) -> list[_Held]:
        """Return what a program's results hold; ``module`` and ``iterations`` are its caller's."""
        known: dict[Var, _Held] = dict(zip(jaxpr.invars, held, strict=True))

        def of(atom: Var | Literal) -> _Held:
            return _CONSTANT if isinstance(atom, Literal) else known.get(atom, _CONSTANT)

        for eqn in jaxpr.eqns:
            inside = module_of(name_stack(eqn)) or module
            operands = [of(atom) for atom in eqn.invars]
            known.update(
                zip(eqn.outvars, self._equation(eqn, operands, inside, iterations), strict=True)
            )
        return [of(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: Equation, operands: list[_Held], module: str, iterations: int
    ) -> list[_Held]:
        name = eqn.primitive.name
        if not any(held.leaves for held in operands):
            depends = any(held.data for held in operands)
            return [_DATA if depends else _CONSTANT] * len(eqn.outvars)
        if name in _ENTERED:
            return self.program(called_jaxpr(eqn).jaxpr, operands, module, iterations)
        if name == "scan":
            return self._scan(eqn, operands, module, iterations)
        if name == "while":
            # Of unknown length, so that no gradient flows back through it.
            return [_DATA] * len(eqn.outvars)
        if name == "cond":
            for branch in eqn.params["branches"]:
                self.program(branch.jaxpr, operands[1:], module, iterations)
            return [_DATA] * len(eqn.outvars)
        if not any(held.data for held in operands):
            return [_joined(operands, aval_of(result), module) for result in eqn.outvars]
        self.reads.extend(
            WeightRead(leaf, name, module, iterations, held.sizes, held.through)
            for held in operands
            for leaf in sorted(held.leaves)
        )
        return [_DATA] * len(eqn.outvars)

    def _scan(
        self, eqn: Equation, operands: list[_Held], module: str, iterations: int
    ) -> list[_Held]:
        """Follow a scan: constants are read in every iteration, of stacks each has its own part."""
        num_consts, num_carry = scan_counts(eqn)
        consts, carries = operands[:num_consts], [_DATA] * num_carry
        inner: Jaxpr = eqn.params["jaxpr"].jaxpr
        rows = [
            _joined([held], aval_of(variable), module) if held.leaves else held
            for held, variable in zip(
                operands[num_consts + num_carry :],
                inner.invars[num_consts + num_carry :],
                strict=True,
            )
        ]
        before = len(self.reads)
        length: int = eqn.params["length"]
        self.program(inner, [*consts, *carries, *rows], module, iterations * length)
        fixed = frozenset(leaf for held in consts for leaf in held.leaves)
        self.reads[before:] = [
            read if read.leaf in fixed else replace(read, iterations=read.iterations // length)
            for read in self.reads[before:]
        ]
        return [_DATA] * len(eqn.outvars)


def _joined(operands: Sequence[_Held], result: Any, module: str) -> _Held:
    """Return what a value holds that is computed from weights alone."""
    return _Held(
        frozenset[int]().union(*(held.leaves for held in operands)),
        frozenset({result.size * result.dtype.itemsize}).union(*(held.sizes for held in operands)),
        frozenset({module}).union(*(held.through for held in operands)),
    )


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
