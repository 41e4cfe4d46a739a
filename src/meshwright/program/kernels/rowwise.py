"""Norms and activations whose gradient recomputes them from their inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.repeated_vector import repeats_on
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Numerics,
    Value,
    Var,
    aval_of,
    name_stack,
)
from meshwright.program.kernels.match_rowwise import RowwiseMatch
from meshwright.program.kernels.regions import Region


@dataclass(frozen=True)
class RowwiseKernel:
    """Evaluates equations as written; only their inputs and sums over features are saved."""

    match: RowwiseMatch
    name: str = "recomputed"

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the result."""
        match, numerics = self.match, env.evaluator.numerics
        half = [env.is_half_weight(v) for v in match.vectors]

        def evaluate(operands: Sequence[Any], sums: Mapping[Var, Any] | None) -> dict[Var, Any]:
            inputs = (*match.activations, *match.vectors)
            values: dict[Var, Any] = dict(zip(inputs, operands, strict=True))
            rounded = {v for v, is_half in zip(match.vectors, half, strict=True) if is_half}
            _evaluate(match.eqns, values, rounded, numerics, sums, mesh)
            return values

        sums = [v for eqn in match.eqns if eqn.primitive.name == "reduce_sum" for v in eqn.outvars]

        has_tanh = any(eqn.primitive.name == "tanh" for eqn in match.eqns)
        apart = has_tanh and mesh.planned_for is None

        @jax.custom_vjp
        def run(*operands: Any) -> Any:
            return evaluate(operands, None)[match.output]

        def forward(*operands: Any) -> tuple[Any, Any]:
            if apart:
                # The compiler would write both what a product returns and its gelu, to multiply
                # the latter with the gate in another kernel.
                operands = lax.optimization_barrier(operands)
            values = evaluate(operands, None)
            return values[match.output], (operands, [values[v] for v in sums])

        def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
            # Otherwise the compiler would save what it could recompute.
            operands, known = lax.optimization_barrier(saved)
            known_sums = dict(zip(sums, known, strict=True))
            # An activation is read several times; its gradients are added before they are rounded.
            wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in operands]
            _, pullback = jax.vjp(lambda *x: evaluate(x, known_sums)[match.output], *wide)
            gradients = zip(pullback(cotangent), operands, strict=True)
            return tuple(gradient.astype(x.dtype) for gradient, x in gradients)

        operands = [env.read(v) for v in match.activations]
        operands += [env.in_param_dtype(v) for v in match.vectors]
        if mesh.planned_for is not None:
            same = (_structure(match), *half, *mesh.auto_axes.items(), type(numerics))
            forward, backward = _traced_once(forward, same), _traced_once(backward, same)
        run.defvjp(forward, backward)
        return [run(*operands)]


_TRACED: dict[Any, tuple[ClosedJaxpr, Any]] = {}
"""Parts of programs that are planned for, by what they depend on: blocks have the same ones."""


def _traced_once(function: Callable[..., Any], same: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that is traced once for all that are the same.

    Scopes are those of the first one, so what will run is not made this way.
    """

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        key = (function.__name__, same, tree, *((x.shape, x.dtype) for x in leaves))
        if key not in _TRACED:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
            _TRACED[key] = closed, jax.tree.structure(shapes)
        closed, results = _TRACED[key]
        return jax.tree.unflatten(results, Evaluator().run(closed, leaves))

    return run


def _structure(match: RowwiseMatch) -> tuple[Any, ...]:
    """Return what two matches have in common that compute the same from the same inputs."""
    inputs = (*match.activations, *match.vectors)
    numbers: dict[Var, int] = {v: number for number, v in enumerate(inputs)}

    def name(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return str(atom.val), str(aval_of(atom))
        return numbers.setdefault(atom, len(numbers)), str(aval_of(atom))

    computed = [
        (
            eqn.primitive.name,
            str(sorted(eqn.params.items(), key=lambda item: item[0])),
            *map(name, (*eqn.invars, *eqn.outvars)),
        )
        for eqn in match.eqns
    ]
    return (*computed, name(match.output))


def _evaluate(
    eqns: Sequence[Equation],
    values: dict[Var, Any],
    rounded: set[Var],
    numerics: Numerics,
    sums: Mapping[Var, Any] | None,
    mesh: MeshView,
) -> None:
    """Evaluate equations; weights in half precision are rounded after they are repeated."""
    repeat = repeats_on(mesh)
    for eqn in eqns:
        shape = aval_of(eqn.outvars[0]).shape

        def operand(atom: Atom, shape: tuple[int, ...] = shape) -> Any:
            if not isinstance(atom, Literal) and atom in rounded:
                repeated = repeat(values[atom], shape)
                return repeated.astype(aval_of(atom).dtype)
            value = _as_traced(atom, values, numerics)
            own = jnp.shape(value)
            same_rank = len(own) == len(shape) and own[-1:] == shape[-1:]
            # The same for all rows of an elementwise result.
            repeated = same_rank and own != shape and all(size == 1 for size in own[:-1])
            return repeat(value, shape) if repeated else value

        # What is sent for a weight belongs to the module that reads it.
        with jax.named_scope(name_stack(eqn) or "rowwise"):
            operands = [operand(atom) for atom in eqn.invars]
            if sums is not None and eqn.outvars[0] in sums:
                values[eqn.outvars[0]] = _known_sum(eqn, operands[0], sums[eqn.outvars[0]])
            else:
                values.update(zip(eqn.outvars, numerics.bind(eqn, operands), strict=True))


def _as_traced(atom: Atom, values: Mapping[Var, Any], numerics: Numerics) -> Any:
    """Return the value of an atom in the dtype that equations read it in."""
    if isinstance(atom, Literal):
        return numerics.convert(atom.val)
    value, dtype = values[atom], aval_of(atom).dtype
    narrower = value.dtype == jnp.float32 and dtype in HALF
    return value.astype(dtype) if narrower else value


def _known_sum(eqn: Equation, operand: Any, known: Any) -> Any:
    """Return a sum that is known already, with the gradient of summing."""
    axes, shape = tuple(eqn.params["axes"]), operand.shape

    total: Any = jax.custom_vjp(lambda _, known: known)

    def backward(_: None, cotangent: Any) -> tuple[Any, Any]:
        kept = [d for d in range(len(shape)) if d not in axes]
        return lax.broadcast_in_dim(cotangent, shape, kept), jnp.zeros_like(known)

    total.defvjp(lambda _, known: (known, None), backward)
    return total(operand, known)
