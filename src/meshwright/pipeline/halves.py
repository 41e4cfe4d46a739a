"""A stage's forward and backward as programs, and what is kept from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.pipeline.slicing import inputs_of, needed, reached, variables
from meshwright.program.interpret import Environment, Interpreter
from meshwright.program.jaxprs import ClosedJaxpr, Equation, Literal, Var, called_jaxpr, structs_of

Function = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""From (weights, fixed, x, others) to (y, further results)."""


@dataclass(frozen=True)
class Taken:
    """What a differentiated function gives.

    Attributes:
        y: its result.
        further: its results without a gradient.
        kept: what the backward needs of this evaluation, weights and what follows from them
            left out.
    """

    y: Any
    further: Any
    kept: list[Any]


class Differentiated:
    """A function whose backward runs later, from kept values, at once or in two halves.

    Whatever depends on weights and fixed values alone (their casts, gathered or transposed forms)
    is not kept between forward and backward but made again.

    Args:
        function: from (weights, fixed, x, others) to (y, further results). Gradients are taken
            with respect to weights and x.
        weights: examples or shapes of its weights, the same in forward and backward.
        fixed: examples or shapes of values without gradients, the same in forward and backward.
        x: examples or shapes of its input.
        others: examples or shapes of inputs without gradients, which differ from call to call.
    """

    def __init__(self, function: Function, weights: Any, fixed: Any, x: Any, others: Any) -> None:
        trees: dict[str, Any] = {}

        def run(weights: Any, fixed: Any, x: Any, others: Any) -> list[Any]:
            y, pullback, further = jax.vjp(
                lambda weights, x: function(weights, fixed, x, others), weights, x, has_aux=True
            )
            # A pullback is a pytree whose leaves are what it keeps.
            kept, trees["pullback"] = jax.tree.flatten(pullback)
            results, trees["results"] = jax.tree.flatten((y, further))
            trees["num_results"] = len(results)
            return [*results, *kept]

        self._forward = jax.make_jaxpr(run)(weights, fixed, x, others)
        self._results: Any = trees["results"]
        self._num_results: int = trees["num_results"]
        jaxpr = self._forward.jaxpr
        still = len(jax.tree.leaves((weights, fixed)))
        moving = reached(jaxpr.eqns, set(jaxpr.invars[still:]))
        self._num_still = still
        self._read_back = jaxpr.outvars[self._num_results :]
        # Some values are read by several layers; one copy is kept.
        self._kept = [v for v in variables(self._read_back) if v in moving]
        self._again = needed(jaxpr.eqns, [v for v in variables(self._read_back) if v not in moving])
        y_shape = jax.tree.unflatten(self._results, structs_of(jaxpr.outvars[: self._num_results]))
        self._backward = self._trace_backward(trees["pullback"], y_shape[0])
        self._weights_tree = jax.tree.structure(weights)
        self._x_tree = jax.tree.structure(x)
        self._halves: _Halves | None = None

    @property
    def kept_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what is kept between forward and backward."""
        return structs_of(self._kept)

    @property
    def cut_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what is kept between the input gradient and the weight gradient."""
        return structs_of(self._split.cut)

    def forward(self, weights: Any, fixed: Any, x: Any, others: Any) -> Taken:
        """Evaluate the function."""
        out = Interpreter().run(self._forward, jax.tree.leaves((weights, fixed, x, others)))
        y, further = jax.tree.unflatten(self._results, out[: self._num_results])
        pairs = zip(self._read_back, out[self._num_results :], strict=True)
        values = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
        return Taken(y, further, [values[v] for v in self._kept])

    def backward(self, weights: Any, fixed: Any, kept: Sequence[Any], ct: Any) -> tuple[Any, Any]:
        """Return the gradients with respect to weights and x."""
        residuals = self._all_kept(weights, fixed, kept)
        out = Interpreter().run(self._backward, [*residuals, *jax.tree.leaves(ct)])
        weights = jax.tree.unflatten(self._weights_tree, out[: self._num_weights])
        return weights, self._unflatten_x(out[self._num_weights :])

    def input_gradient(
        self, weights: Any, fixed: Any, kept: Sequence[Any], ct: Any
    ) -> tuple[Any, list[Any]]:
        """Return the gradient with respect to x, and what the weights' gradient needs of it."""
        env = self._environment(self._all_kept(weights, fixed, kept))
        env.update(zip(self._split.cotangents, jax.tree.leaves(ct), strict=True))
        interpreter = Interpreter()
        interpreter.equations(self._split.first, env)
        out = self._split.closed.jaxpr.outvars
        return self._unflatten_x([interpreter.read(a, env) for a in out[self._num_weights :]]), [
            env[v] for v in self._split.cut
        ]

    def weight_gradient(
        self, weights: Any, fixed: Any, kept: Sequence[Any], cut: Sequence[Any]
    ) -> Any:
        """Return the gradient with respect to weights."""
        env = self._environment(self._all_kept(weights, fixed, kept))
        env.update(zip(self._split.cut, cut, strict=True))
        interpreter = Interpreter()
        interpreter.equations(self._split.second, env)
        atoms = self._split.closed.jaxpr.outvars[: self._num_weights]
        return jax.tree.unflatten(self._weights_tree, [interpreter.read(a, env) for a in atoms])

    @property
    def _num_weights(self) -> int:
        return self._weights_tree.num_leaves

    def _trace_backward(self, tree: Any, y: Any) -> ClosedJaxpr:
        def run(kept: list[Any], ct: Any) -> Any:
            return jax.tree.leaves(jax.tree.unflatten(tree, kept)(ct))

        return jax.make_jaxpr(run)(structs_of(self._read_back), y)

    @property
    def _split(self) -> _Halves:
        if self._halves is None:
            self._halves = split_backward(self._backward, len(self._read_back), self._num_weights)
        return self._halves

    def _environment(self, residuals: Sequence[Any]) -> Environment:
        jaxpr, consts = self._split.closed.jaxpr, self._split.closed.consts
        env: Environment = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, residuals, strict=False))
        return env

    def _all_kept(self, weights: Any, fixed: Any, kept: Sequence[Any]) -> list[Any]:
        """Return everything the pullback reads; what follows from weights alone is made again."""
        jaxpr, consts = self._forward.jaxpr, self._forward.consts
        env: Environment = dict(zip(jaxpr.constvars, consts, strict=True))
        still = jax.tree.leaves((weights, fixed))
        env.update(zip(jaxpr.invars[: self._num_still], still, strict=True))
        interpreter = Interpreter()
        interpreter.equations(self._again, env)
        env.update(zip(self._kept, kept, strict=True))
        return [interpreter.read(atom, env) for atom in self._read_back]

    def _unflatten_x(self, out: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._x_tree, out)


@dataclass(frozen=True)
class _Halves:
    """A backward program in two parts.

    Attributes:
        closed: the whole program, calls and remat taken apart.
        cotangents: its inputs that are gradients of the results.
        first: the equations of the gradient with respect to x.
        second: what the weights' gradient needs beyond them.
        cut: values of the first part that the second one reads.
    """

    closed: ClosedJaxpr
    cotangents: tuple[Var, ...]
    first: list[Equation]
    second: list[Equation]
    cut: list[Var]


def split_backward(backward: ClosedJaxpr, num_kept: int, num_weights: int) -> _Halves:
    """Split a program (kept values, cotangents) → (weight gradients, x gradients).

    A chain of layers hands the gradient of its result back layer by layer. The first half does
    just that; the second multiplies what it passed on the way with the layers' inputs.
    """
    closed = _flat(backward)
    jaxpr = closed.jaxpr
    weight_atoms, x_atoms = jaxpr.outvars[:num_weights], jaxpr.outvars[num_weights:]
    first = needed(jaxpr.eqns, x_atoms)
    done = {id(eqn) for eqn in first}
    rest = [eqn for eqn in needed(jaxpr.eqns, weight_atoms) if id(eqn) not in done]
    cotangents = tuple(jaxpr.invars[num_kept:])
    own = {variable for eqn in first for variable in eqn.outvars} | set(cotangents)
    cut = [v for v in variables([*_reads_in_order(rest), *weight_atoms]) if v in own]
    return _Halves(closed, cotangents, first, rest, cut)


def _reads_in_order(eqns: Sequence[Equation]) -> list[Var]:
    """Return what equations read from outside, in the order in which they do."""
    outside = inputs_of(eqns)
    return [v for v in variables(a for eqn in eqns for a in eqn.invars) if v in outside]


def _flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    inputs = structs_of(closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: _TakenApart().run(closed, args))(*inputs)


class _TakenApart(Interpreter):
    """Evaluates a program with calls and remat replaced by what they contain.

    Backward and forward are different ticks, so nothing could be computed once for both anyway.
    """

    def equation(self, eqn: Equation, args: list[Any]) -> list[Any]:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            return self.run(called_jaxpr(eqn), args)
        return args if eqn.primitive.name == "optimization_barrier" else super().equation(eqn, args)
