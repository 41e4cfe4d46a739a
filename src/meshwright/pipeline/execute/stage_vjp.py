"""A stage's forward and backward as programs, and the values saved from one to the other."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
from jax import Array

from meshwright.pipeline.execute.least_saved import BackwardHalves, least_saved, split_backward
from meshwright.program.evaluate.dependencies import inlined, needed_equations, variables
from meshwright.program.evaluate.evaluator import Environment, Evaluator, entering
from meshwright.program.evaluate.known_casts import KnownCasts, dtypes_read
from meshwright.program.jaxpr.equations import ClosedJaxpr, structs_of
from meshwright.trees import PyTree, TreeDef

Function = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""From (weights, fixed, x, others) to (y, further results)."""


class HeldValues(NamedTuple):
    """The values that forward and backward both read, with and without gradients.

    ``casts`` are both in the dtypes in which they are read; None to cast them there.
    """

    weights: PyTree
    fixed: PyTree = ()
    casts: PyTree = None


class ForwardValues(NamedTuple):
    """The result of a forward pass, results without a gradient, and what backward starts from."""

    y: PyTree
    further: PyTree
    saved: list[Array]


class StageVJP:
    """A function whose backward runs later, from saved values, at once or in two halves.

    What is saved is the least, in bytes, from which all residuals follow without much work: values
    that depend on weights and fixed values alone (casts, gathered or transposed weights) and what
    compilers fuse into its consumers (activation functions, normalized values, masks) are
    recomputed. Gradients are taken with respect to weights and x; ``others`` have none, and differ
    from call to call.
    """

    def __init__(self, function: Function, held: HeldValues, x: PyTree, others: PyTree) -> None:
        weights, fixed, _ = held
        self._forward, self._results, pullback = _trace_forward(function, weights, fixed, x, others)
        self._num_results = self._results.num_leaves
        jaxpr = self._forward.jaxpr
        # The inputs that are the same in forward and backward come first.
        self._constant_tree = jax.tree.structure((weights, fixed))
        self._num_constant = self._constant_tree.num_leaves
        self._residuals = jaxpr.outvars[self._num_results :]
        residuals = variables(self._residuals)
        self._saved = least_saved(jaxpr.eqns, jaxpr.invars[self._num_constant :], residuals)
        self._recomputed = needed_equations(jaxpr.eqns, residuals, given=self._saved)
        y, _ = jax.tree.unflatten(self._results, structs_of(jaxpr.outvars[: self._num_results]))
        self._backward = jax.make_jaxpr(
            lambda residuals, gradient: jax.tree.leaves(pullback.unflatten(residuals)(gradient))
        )(structs_of(self._residuals), y)
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

        Casts that are made in advance, nested like this, may be passed as `HeldValues.casts`.
        """
        constant = self._forward.jaxpr.invars[: self._num_constant]
        return jax.tree.unflatten(
            self._constant_tree, dtypes_read(self._forward.jaxpr.eqns, constant)
        )

    def forward(self, held: HeldValues, x: PyTree, others: PyTree) -> ForwardValues:
        """Evaluate the function."""
        evaluator = _evaluator(held)
        arguments = jax.tree.leaves((held.weights, held.fixed, x, others))
        env = evaluator.environment(self._forward, arguments)
        evaluator.equations(self._forward.jaxpr.eqns, env)
        out = [env.value(atom) for atom in self._forward.jaxpr.outvars[: self._num_results]]
        y, further = jax.tree.unflatten(self._results, out)
        return ForwardValues(y, further, [env.values[v] for v in self._saved])

    def backward(
        self, held: HeldValues, saved: Sequence[Array], gradient: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the gradients with respect to weights and x, given the gradient of the result."""
        evaluator = _evaluator(held)
        residuals = self._all_residuals(held, saved, evaluator)
        out = evaluator.run(self._backward, [*residuals, *jax.tree.leaves(gradient)])
        weights = jax.tree.unflatten(self._weights_tree, out[: self._num_weights])
        return weights, jax.tree.unflatten(self._x_tree, out[self._num_weights :])

    def input_gradient(
        self, held: HeldValues, saved: Sequence[Array], gradient: PyTree
    ) -> tuple[PyTree, list[Array]]:
        """Return the gradient with respect to x, and the values the weight gradient needs."""
        env = self._halves_environment(held, saved)
        env.values.update(zip(self._halves.cotangents, jax.tree.leaves(gradient), strict=True))
        env.evaluator.equations(self._halves.first, env)
        atoms = self._halves.closed.jaxpr.outvars[self._num_weights :]
        x = jax.tree.unflatten(self._x_tree, [env.value(atom) for atom in atoms])
        return x, [env.values[v] for v in self._halves.cut]

    def weight_gradient(
        self, held: HeldValues, saved: Sequence[Array], cut: Sequence[Array]
    ) -> PyTree:
        """Return the gradient with respect to weights."""
        env = self._halves_environment(held, saved)
        env.values.update(zip(self._halves.cut, cut, strict=True))
        env.evaluator.equations(self._halves.second, env)
        atoms = self._halves.closed.jaxpr.outvars[: self._num_weights]
        return jax.tree.unflatten(self._weights_tree, [env.value(a) for a in atoms])

    @property
    def _num_weights(self) -> int:
        return self._weights_tree.num_leaves

    @cached_property
    def _halves(self) -> BackwardHalves:
        return split_backward(self._backward, len(self._residuals), self._num_weights)

    def _halves_environment(self, held: HeldValues, saved: Sequence[Array]) -> Environment:
        """Return the environment that both halves of the backward pass start from."""
        evaluator = _evaluator(held)
        residuals = self._all_residuals(held, saved, evaluator)
        jaxpr, consts = self._halves.closed.jaxpr, self._halves.closed.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, residuals, strict=False))
        return Environment(evaluator, values)

    def _all_residuals(
        self, held: HeldValues, saved: Sequence[Array], evaluator: Evaluator
    ) -> list[Array]:
        """Return all residuals, from those that were saved."""
        jaxpr, consts = self._forward.jaxpr, self._forward.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        constant = jax.tree.leaves((held.weights, held.fixed))
        values.update(zip(jaxpr.invars[: self._num_constant], constant, strict=True))
        values.update(zip(self._saved, saved, strict=True))
        env = Environment(evaluator, values)
        env.evaluator.equations(self._recomputed, env)
        return [env.value(atom) for atom in self._residuals]


def _evaluator(held: HeldValues) -> Evaluator:
    if held.casts is None:
        return Evaluator()
    values = jax.tree.leaves((held.weights, held.fixed))
    return Evaluator([KnownCasts(values, jax.tree.leaves(held.casts))])


def _trace_forward(
    function: Function, weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree
) -> tuple[ClosedJaxpr, TreeDef, TreeDef]:
    """Return the program of results and residuals, and how the results and the pullback nest."""
    trees: list[tuple[TreeDef, TreeDef]] = []

    def run(weights: PyTree, fixed: PyTree, x: PyTree, others: PyTree) -> list[Array]:
        y, pullback, further = jax.vjp(
            lambda weights, x: function(weights, fixed, x, others), weights, x, has_aux=True
        )
        # A pullback is a pytree whose leaves are its residuals.
        residuals, pullback_tree = jax.tree.flatten(pullback)
        results, results_tree = jax.tree.flatten((y, further))
        trees.append((results_tree, pullback_tree))
        return [*results, *residuals]

    closed = jax.make_jaxpr(run)(weights, fixed, x, others)
    # Functions whose derivative has been taken already are inlined, so that they count as cheap.
    return inlined(closed, [entering({"custom_jvp_call"})]), *trees[-1]
