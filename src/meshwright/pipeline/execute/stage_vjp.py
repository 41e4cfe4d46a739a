"""A stage's forward and backward as programs, and the values saved from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax

from meshwright.pipeline.aliases import Array, TreeDef
from meshwright.pipeline.execute.casts import KnownCasts, dtypes_read
from meshwright.pipeline.execute.least_saved import CHEAP, least_saved, results_to_keep
from meshwright.program.evaluate.dependencies import (
    inputs_of,
    needed_equations,
    variables,
)
from meshwright.program.evaluate.evaluator import Environment, Evaluator, Rule
from meshwright.program.jaxpr.equations import (
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Value,
    Var,
    called_jaxpr,
    structs_of,
)
from meshwright.trees import PyTree

Function = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""From (weights, fixed, x, others) to (y, further results)."""
BARRIER = "optimization_barrier"


@dataclass(frozen=True)
class ForwardValues:
    """The results of a forward pass.

    Attributes:
        y: the result.
        further: results without a gradient.
        saved: the values from which the residuals of the backward pass are computed.
    """

    y: PyTree
    further: PyTree
    saved: list[Array]


class _Trees(NamedTuple):
    """How the results of the forward program are nested, and the pullback after them."""

    results: TreeDef
    pullback: TreeDef


class StageVJP:
    """A function whose backward runs later, from saved values, at once or in two halves.

    What is saved is the least, in bytes, from which all residuals follow without much work: values
    that depend on weights and fixed values alone (casts, gathered or transposed weights) and what
    compilers fuse into its consumers (activation functions, normalized values, masks) are computed
    again.

    Args:
        function: from (weights, fixed, x, others) to (y, further results). Gradients are taken
            with respect to weights and x.
        weights: examples or shapes of its weights, the same in forward and backward.
        fixed: examples or shapes of values without gradients, the same in forward and backward.
        x: examples or shapes of its input.
        others: examples or shapes of inputs without gradients, which differ from call to call.
    """

    def __init__(
        self, function: Function, weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree
    ) -> None:
        self._forward, trees = _trace_forward(function, weights, fixed, x, others)
        self._results, self._num_results = trees.results, trees.results.num_leaves
        jaxpr = self._forward.jaxpr
        # The inputs that are the same in forward and backward come first.
        self._constant_tree = jax.tree.structure((weights, fixed))
        self._num_constant = self._constant_tree.num_leaves
        self._residuals = jaxpr.outvars[self._num_results :]
        residuals = variables(self._residuals)
        self._saved = least_saved(jaxpr.eqns, jaxpr.invars[self._num_constant :], residuals)
        self._recomputed = needed_equations(jaxpr.eqns, residuals, given=self._saved)
        y, _ = jax.tree.unflatten(self._results, structs_of(jaxpr.outvars[: self._num_results]))
        self._backward = self._trace_backward(trees.pullback, y)
        self._weights_tree = jax.tree.structure(weights)
        self._x_tree = jax.tree.structure(x)

    @property
    def saved_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the values saved between forward and backward."""
        return structs_of(self._saved)

    @property
    def cut_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the values saved between the input gradient and the weight gradient."""
        return structs_of(self._halves.cut)

    @property
    def dtypes_read(self) -> PyTree:
        """The dtype in which each leaf of (weights, fixed) is read.

        Casts that are made in advance may be passed to all methods as ``casts``, nested like this.
        """
        constant = self._forward.jaxpr.invars[: self._num_constant]
        return jax.tree.unflatten(
            self._constant_tree, dtypes_read(self._forward.jaxpr.eqns, constant)
        )

    def forward(
        self, weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree, casts: PyTree = None
    ) -> ForwardValues:
        """Evaluate the function."""
        evaluator = _evaluator((weights, fixed), casts)
        arguments = jax.tree.leaves((weights, fixed, x, others))
        env = evaluator.environment(self._forward, arguments)
        evaluator.equations(self._forward.jaxpr.eqns, env)
        out = [env.value(atom) for atom in self._forward.jaxpr.outvars[: self._num_results]]
        y, further = jax.tree.unflatten(self._results, out)
        return ForwardValues(y, further, [env.values[v] for v in self._saved])

    def backward(
        self,
        weights: PyTree,
        fixed: PyTree,
        saved: Sequence[Array],
        gradient: PyTree,
        casts: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """Return the gradients with respect to weights and x, given the gradient of the result."""
        evaluator = _evaluator((weights, fixed), casts)
        residuals = self._all_residuals(weights, fixed, saved, evaluator)
        out = evaluator.run(self._backward, [*residuals, *jax.tree.leaves(gradient)])
        weights = jax.tree.unflatten(self._weights_tree, out[: self._num_weights])
        return weights, self._unflatten_x(out[self._num_weights :])

    def input_gradient(
        self,
        weights: PyTree,
        fixed: PyTree,
        saved: Sequence[Array],
        gradient: PyTree,
        casts: PyTree = None,
    ) -> tuple[PyTree, list[Array]]:
        """Return the gradient with respect to x, and the values the weight gradient needs."""
        env = self._halves_environment(weights, fixed, saved, casts)
        env.values.update(zip(self._halves.cotangents, jax.tree.leaves(gradient), strict=True))
        env.evaluator.equations(self._halves.first, env)
        atoms = self._halves.closed.jaxpr.outvars[self._num_weights :]
        x = self._unflatten_x([env.value(atom) for atom in atoms])
        return x, [env.values[v] for v in self._halves.cut]

    def weight_gradient(
        self,
        weights: PyTree,
        fixed: PyTree,
        saved: Sequence[Array],
        cut: Sequence[Array],
        casts: PyTree = None,
    ) -> PyTree:
        """Return the gradient with respect to weights."""
        env = self._halves_environment(weights, fixed, saved, casts)
        env.values.update(zip(self._halves.cut, cut, strict=True))
        env.evaluator.equations(self._halves.second, env)
        atoms = self._halves.closed.jaxpr.outvars[: self._num_weights]
        return jax.tree.unflatten(self._weights_tree, [env.value(a) for a in atoms])

    @property
    def _num_weights(self) -> int:
        return self._weights_tree.num_leaves

    def _trace_backward(self, pullback: TreeDef, y: PyTree) -> ClosedJaxpr:
        def run(residuals: list[Array], gradient: PyTree) -> list[Array]:
            return jax.tree.leaves(jax.tree.unflatten(pullback, residuals)(gradient))

        return jax.make_jaxpr(run)(structs_of(self._residuals), y)

    @cached_property
    def _halves(self) -> _Halves:
        return split_backward(self._backward, len(self._residuals), self._num_weights)

    def _halves_environment(
        self, weights: PyTree, fixed: PyTree, saved: Sequence[Array], casts: PyTree
    ) -> Environment:
        """Return what both halves of the backward pass start with: the residuals."""
        evaluator = _evaluator((weights, fixed), casts)
        residuals = self._all_residuals(weights, fixed, saved, evaluator)
        jaxpr, consts = self._halves.closed.jaxpr, self._halves.closed.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, residuals, strict=False))
        return Environment(evaluator, values)

    def _all_residuals(
        self, weights: PyTree, fixed: PyTree, saved: Sequence[Array], evaluator: Evaluator
    ) -> list[Array]:
        """Return all residuals, from those that were saved."""
        jaxpr, consts = self._forward.jaxpr, self._forward.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        constant = jax.tree.leaves((weights, fixed))
        values.update(zip(jaxpr.invars[: self._num_constant], constant, strict=True))
        values.update(zip(self._saved, saved, strict=True))
        env = Environment(evaluator, values)
        env.evaluator.equations(self._recomputed, env)
        return [env.value(atom) for atom in self._residuals]

    def _unflatten_x(self, out: Sequence[Array]) -> PyTree:
        return jax.tree.unflatten(self._x_tree, out)


def _evaluator(constant: PyTree, casts: PyTree) -> Evaluator:
    if casts is None:
        return Evaluator()
    return Evaluator([KnownCasts(jax.tree.leaves(constant), jax.tree.leaves(casts))])


def _trace_forward(
    function: Function, weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree
) -> tuple[ClosedJaxpr, _Trees]:
    """Return the program of results and residuals, and how both are nested."""
    trees: list[_Trees] = []

    def run(weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree) -> list[Array]:
        y, pullback, further = jax.vjp(
            lambda weights, x: function(weights, fixed, x, others), weights, x, has_aux=True
        )
        # A pullback is a pytree whose leaves are its residuals.
        residuals, pullback_tree = jax.tree.flatten(pullback)
        results, results_tree = jax.tree.flatten((y, further))
        trees.append(_Trees(results_tree, pullback_tree))
        return [*results, *residuals]

    closed = jax.make_jaxpr(run)(weights, fixed, x, others)
    return _inlined(closed, []), trees[-1]


@dataclass(frozen=True)
class _Halves:
    """A backward program in two parts.

    Attributes:
        closed: the whole program, calls and remat inlined.
        cotangents: its inputs that are gradients of the results.
        first: the equations of the gradient with respect to x.
        second: the equations of the weight gradient, given the cut.
        cut: values of the first part that the second one reads.
    """

    closed: ClosedJaxpr
    cotangents: tuple[Var, ...]
    first: list[Equation]
    second: list[Equation]
    cut: list[Var]


def split_backward(backward: ClosedJaxpr, num_residuals: int, num_weights: int) -> _Halves:
    """Split a program (residuals, cotangents) → (weight gradients, x gradients).

    The first half propagates the gradient of the result back through the layers; the second
    multiplies these gradients with the inputs of the layers. Sums for which the second half would
    need values that its products do not, such as those for the weights of a norm, belong to the
    first half, where these values are at hand.
    """
    closed = _inlined(backward, [_inline])
    jaxpr = closed.jaxpr
    weight_atoms, x_atoms = jaxpr.outvars[:num_weights], jaxpr.outvars[num_weights:]
    cotangents = tuple(jaxpr.invars[num_residuals:])
    first = needed_equations(jaxpr.eqns, x_atoms)
    products, sums = _by_work(_without(jaxpr.eqns, first), weight_atoms)
    cut = _cut(jaxpr.eqns, first, cotangents, products)
    early = [a for a in sums if not _follows(a, jaxpr.eqns, first, cotangents, cut)]
    first = needed_equations(jaxpr.eqns, [*x_atoms, *early])
    cut = _cut(jaxpr.eqns, first, cotangents, weight_atoms)
    second = needed_equations(jaxpr.eqns, weight_atoms, given=cut)
    return _Halves(closed, cotangents, first, second, cut)


def _by_work(
    eqns: Sequence[Equation], weight_atoms: Sequence[Atom]
) -> tuple[list[Atom], list[Atom]]:
    """Return the gradients that equations compute by products or the like, and by mere sums."""
    products, sums = [], []
    for atom in weight_atoms:
        names = {eqn.primitive.name for eqn in needed_equations(eqns, [atom])}
        (sums if names <= CHEAP | {"reduce_sum", BARRIER} else products).append(atom)
    return products, sums


def _cut(
    eqns: Sequence[Equation],
    first: Sequence[Equation],
    cotangents: Sequence[Var],
    wanted: Sequence[Atom],
) -> list[Var]:
    """Return what the first half has to keep so that the second can compute these gradients."""
    rest = needed_equations(_without(eqns, first), wanted)
    reads = variables([*_reads_in_order(rest), *wanted])
    return least_saved(first, [*cotangents, *results_to_keep(first)], reads)


def _follows(
    atom: Atom,
    eqns: Sequence[Equation],
    first: Sequence[Equation],
    cotangents: Sequence[Var],
    cut: Sequence[Var],
) -> bool:
    """Whether a gradient can be computed from a cut without repeating work of the first half."""
    steps = needed_equations(eqns, [atom], given=cut)
    again = {id(eqn) for eqn in first}
    missing = set(cotangents) - set(cut)
    return missing.isdisjoint(variables([atom, *_reads_in_order(steps)])) and all(
        eqn.primitive.name in CHEAP for eqn in steps if id(eqn) in again
    )


def _without(eqns: Sequence[Equation], others: Sequence[Equation]) -> list[Equation]:
    """Return the equations that are not among others."""
    left_out = {id(eqn) for eqn in others}
    return [eqn for eqn in eqns if id(eqn) not in left_out]


def _reads_in_order(eqns: Sequence[Equation]) -> list[Var]:
    """Return the outside variables that equations read, in order of first use."""
    outside = inputs_of(eqns)
    return [v for v in variables(a for eqn in eqns for a in eqn.invars) if v in outside]


def _inlined(closed: ClosedJaxpr, rules: Sequence[Rule]) -> ClosedJaxpr:
    """Return a program with calls inlined, evaluated by these rules."""
    inputs = structs_of(closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: Evaluator(rules).run(closed, args))(*inputs)


def _inline(eqn: Equation, env: Environment) -> list[Value] | None:
    """Replace remat by its body.

    Forward and backward run in different ticks, where remat has no effect. A barrier between
    several values would tie both halves together; that of a single one, such as between the two
    steps of a sum, stays.
    """
    if eqn.primitive.name in REMATS:
        return env.run(called_jaxpr(eqn), env.operands(eqn))
    ties = eqn.primitive.name == BARRIER and len(eqn.invars) > 1
    return env.operands(eqn) if ties else None
