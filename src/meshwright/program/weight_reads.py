"""Where a program reads its weights: with data in the forward pass, and again in the backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.program.jaxpr.equations import (
    CALLS,
    CUSTOM_DERIVATIVES,
    REARRANGES,
    REMATS,
    Equation,
    Jaxpr,
    aval_of,
    called_jaxpr,
    equation_module,
    scan_parts,
)
from meshwright.program.jaxpr.walks import called_programs, propagate
from meshwright.program.trace.traced_loss import TracedLoss

_ENTERED = CALLS | REMATS | CUSTOM_DERIVATIVES
_BILINEAR = frozenset({"dot_general", "conv_general_dilated", "mul"})
_LINEAR = frozenset({"add", "add_any", "sub", "neg", "concatenate", "reduce_sum", "gather"})


@dataclass(frozen=True)
class WeightRead:
    """One equation in which a weight meets data: its gradient is a sum over samples.

    Attributes:
        leaf: the number of the step leaf.
        operation: the primitive.
        iterations: how often loops run it with the same weight.
        sizes: bytes of the weight, and of what is computed from it alone before it is read.
        through: the modules in which that is computed.
        size: elements of the value that is read: the weight, or what is computed from it alone.
        together: all weights that this value is computed from.
    """

    leaf: int
    operation: str
    module: str
    iterations: int
    sizes: frozenset[int]
    through: frozenset[str] = frozenset()
    size: int = 0
    together: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Source:
    """What a value is computed from: data, or the leaves of weights.

    With these come the bytes of them and of values between, and the modules that compute those.
    """

    leaves: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()
    through: frozenset[str] = frozenset()
    data: bool = False


_CONSTANT = _Source()
_DATA = _Source(data=True)


def weight_reads(traced: TracedLoss) -> list[WeightRead]:
    """Return every read of a trained weight, in the order of the program."""
    sources = [
        _Source(frozenset({number}), frozenset({step.leaf.nbytes}))
        if step.leaf.role == "param"
        else _DATA
        for number, step in enumerate(traced.layout.step_leaves)
    ]
    reads: list[WeightRead] = []
    rule = partial(_follow_reads, reads, "", 1)
    propagate(traced.closed.jaxpr, [*sources, *[_DATA] * len(traced.batch)], _CONSTANT, rule)
    return reads


def _follow_reads(
    reads: list[WeightRead], caller: str, iterations: int, eqn: Equation, operands: list[_Source]
) -> list[_Source]:
    """Return what the results of an equation are computed from, as is known of its operands.

    The weights that it reads are added to ``reads``. The ``caller`` is the module of the call that
    it is in, and ``iterations`` how often the loops around it run.
    """
    name, module = eqn.primitive.name, equation_module(eqn) or caller
    from_data = any(source.data for source in operands)
    if not any(source.leaves for source in operands):
        return [_DATA if from_data else _CONSTANT] * len(eqn.outvars)
    if name == "while":
        # Of unknown length, so that no gradient flows back through it.
        return [_DATA] * len(eqn.outvars)
    rule = partial(_follow_reads, reads, module, iterations)
    if name in _ENTERED:
        return propagate(called_jaxpr(eqn).jaxpr, operands, _CONSTANT, rule)
    if name == "scan":
        _follow_scan(reads, module, iterations, eqn, operands)
    elif name == "cond":
        for branch, _ in called_programs(eqn):
            propagate(branch.jaxpr, operands[1:], _CONSTANT, rule)
    elif not from_data:
        return [_joined(operands, aval_of(result), module) for result in eqn.outvars]
    else:
        reads.extend(
            WeightRead(
                *(leaf, name, module, iterations, source.sizes, source.through),
                math.prod(aval_of(atom).shape),
                source.leaves,
            )
            for source, atom in zip(operands, eqn.invars, strict=True)
            for leaf in sorted(source.leaves)
        )
    return [_DATA] * len(eqn.outvars)


def _follow_scan(
    reads: list[WeightRead], module: str, iterations: int, eqn: Equation, operands: list[_Source]
) -> None:
    """Follow a scan: each iteration reads all of a constant, and its own part of a stack."""
    inner: Jaxpr = eqn.params["jaxpr"].jaxpr
    consts, carries, stacks = scan_parts(eqn, operands)
    rows = [
        _joined([source], aval_of(variable), module) if source.leaves else source
        for source, variable in zip(stacks, scan_parts(eqn, inner.invars)[2], strict=True)
    ]
    before, length = len(reads), eqn.params["length"]
    rule = partial(_follow_reads, reads, module, iterations * length)
    propagate(inner, [*consts, *[_DATA] * len(carries), *rows], _CONSTANT, rule)
    fixed = frozenset(leaf for source in consts for leaf in source.leaves)
    reads[before:] = [
        read if read.leaf in fixed else replace(read, iterations=read.iterations // length)
        for read in reads[before:]
    ]


def _joined(operands: Sequence[_Source], result: Any, module: str) -> _Source:
    """Return the source of a value that is computed from weights alone."""
    return _Source(
        frozenset[int]().union(*(source.leaves for source in operands)),
        frozenset({result.size * result.dtype.itemsize}).union(*(s.sizes for s in operands)),
        frozenset({module}).union(*(source.through for source in operands)),
    )


@dataclass(frozen=True)
class _Gradient:
    """What the gradient of a value needs; if ``trained``, it flows back to trained leaves.

    The ``weights`` are the numbers of the leaves it is, if it is only a rearranged leaf.
    """

    trained: bool = False
    weights: frozenset[int] = frozenset()


_NO_GRADIENT = _Gradient()


def weights_in_backward(traced: TracedLoss) -> frozenset[int]:
    """Return the numbers of the step leaves whose values the backward pass reads.

    The gradient of x·W needs W only if x has a gradient; that of x + b never needs b.
    """
    leaves = [
        _Gradient(
            step.leaf.role == "param", frozenset({number}) if step.leaf.is_weight else frozenset()
        )
        for number, step in enumerate(traced.layout.step_leaves)
    ]
    read: set[int] = set()
    inputs = [*leaves, *[_NO_GRADIENT] * len(traced.batch)]
    propagate(traced.closed.jaxpr, inputs, _NO_GRADIENT, partial(_follow_gradients, read))
    return frozenset(read)


def _follow_gradients(read: set[int], eqn: Equation, operands: list[_Gradient]) -> list[_Gradient]:
    """Return what the gradients of an equation's results need; add weights it needs to `read`."""
    name, rule = eqn.primitive.name, partial(_follow_gradients, read)
    if name in _ENTERED:
        return propagate(called_jaxpr(eqn).jaxpr, operands, _NO_GRADIENT, rule)
    if name == "scan":
        return _follow_carries(read, eqn, operands)
    if name in REARRANGES or name == "convert_element_type":
        return [operands[0]]
    trained = any(operand.trained for operand in operands)
    if name in _BILINEAR:
        left, right = operands
        read |= left.weights if right.trained else frozenset()
        read |= right.weights if left.trained else frozenset()
    elif name not in _LINEAR and trained:
        read.update(number for operand in operands for number in operand.weights)
    return [_Gradient(trained)] * len(eqn.outvars)


def _follow_carries(read: set[int], eqn: Equation, operands: list[_Gradient]) -> list[_Gradient]:
    """Follow a scan until its carries do not change any more."""
    consts, carries, rows = scan_parts(eqn, operands)
    while True:
        jaxpr: Jaxpr = eqn.params["jaxpr"].jaxpr
        inputs = [*consts, *carries, *rows]
        results = propagate(jaxpr, inputs, _NO_GRADIENT, partial(_follow_gradients, read))
        after = [
            _Gradient(before.trained or result.trained)
            for before, result in zip(carries, results, strict=False)
        ]
        if after == carries:
            return results
        carries = after
