"""Loops whose state is multiplied with weights: what does not wait for the state is done at once.

A recurrent network multiplies the input and the state of every position with weights. Products of
inputs are computed for all positions before the loop, and products of one state with several
weights are joined. The gradients of weights are computed after the loop, from the rows of all
positions: in the loop, every position would read and write all of them to add its own part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.evaluate.dependencies import inputs_of
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Value, Var, aval_of, scan_counts
from meshwright.program.kernels.match_recurrence import RecurrenceMatch, WeightProduct
from meshwright.program.kernels.regions import Region


@dataclass(frozen=True)
class RecurrenceKernel:
    """Evaluates a loop, with what can be taken out of it before or after."""

    match: RecurrenceMatch
    name: str = "weights outside of the loop"

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the results of the loop."""
        (eqn,), match, evaluator = region.eqns, self.match, env.evaluator
        closed, (num_consts, num_carry) = eqn.params["jaxpr"], scan_counts(eqn)
        invars, first = closed.jaxpr.invars, num_consts + num_carry
        operands = [env.read(atom) for atom in eqn.invars]
        outside = evaluator.environment(closed, operands)
        for atom, variable in zip(eqn.invars[:num_consts], invars, strict=False):
            if env.is_half_weight(atom):
                outside.prepared[variable] = env.in_param_dtype(atom)
        evaluator.equations(match.constant, outside)
        stacks = dict(zip(invars[first:], operands[first:], strict=True))
        evaluator.extend(stacks, match.casts)
        widens = mesh.platform == "cpu"
        for group in match.before:
            joined = _Joined(group, outside, widens)
            of_all = joined.of_all_positions(stacks[group[0].rows], *joined.weights())
            stacks.update(joined.parts(of_all))
        read = inputs_of(match.others, closed.jaxpr.outvars)
        varying = {*invars[num_consts:], *stacks}
        constants = [v for v in outside.values if v in read and v not in varying]
        sliced = [v for v in stacks if v in read]
        groups = [_Joined(group, outside, widens) for group in match.inside]
        loop = _Loop(
            eqn, match.others, groups, outside, (constants, invars[num_consts:first], sliced)
        )
        rest = (
            [outside.in_param_dtype(v) for v in constants],
            operands[num_consts:first],
            [stacks[v] for v in sliced],
        )
        return _with_gradients_after(loop)([group.weights() for group in groups], rest)


@dataclass(frozen=True)
class _Joined:
    """Products of the same rows, as one with their weights side by side.

    Attributes:
        outside: the constants of the loop.
        widens: whether the operands of a weight's gradient are widened, as CPUs need it.
    """

    products: Sequence[WeightProduct]
    outside: Environment
    widens: bool

    def weights(self) -> tuple[Value, Value | None]:
        """Return the weights, of inputs × outputs, and the biases, if there are any."""
        read, weights, biases = self.outside.in_param_dtype, list[Value](), list[Value]()
        for product in self.products:
            weight = read(product.eqn.invars[1])
            weights.append(weight.T if product.by else weight)
            zeros = jnp.zeros(product.width, weight.dtype)
            biases.append(zeros if product.bias is None else read(product.bias).reshape(-1))
        biased = any(product.bias is not None for product in self.products)
        return jnp.concatenate(weights, 1), jnp.concatenate(biases) if biased else None

    def parts(self, joined: Value) -> dict[Var, Value]:
        """Return the results of all products."""
        ends = [sum(p.width for p in self.products[: n + 1]) for n in range(len(self.products) - 1)]
        parts = jnp.split(joined, ends, -1)
        return {product.result: part for product, part in zip(self.products, parts, strict=True)}

    def zeros(self, length: int) -> Value:
        """Return zeros for the results of all positions."""
        result = aval_of(self.products[0].result)
        width = sum(product.width for product in self.products)
        zeros = jnp.zeros((length, *result.shape[:-1], width), result.dtype)
        return self.outside.evaluator.numerics.convert(zeros)

    def __call__(self, rows: Value, weight: Value, bias: Value | None) -> Value:
        """Return the joined product."""
        eqn, evaluator = self.products[0].eqn, self.outside.evaluator
        numbers = (((rows.ndim - 1,), (0,)), ((), ()))
        product = eqn.replace(params={**eqn.params, "dimension_numbers": numbers})
        dtype = aval_of(eqn.outvars[0]).dtype
        cast = evaluator.weights.cast
        (result,) = evaluator.numerics.bind(product, [rows, cast(weight, dtype)])
        return result if bias is None else result + cast(bias, dtype)

    def gradients(self, rows: Value, cotangent: Value, like: Any) -> tuple[Value, Value | None]:
        """Return those of weights and biases, summed over all rows in float32."""
        flat = [x.reshape(-1, x.shape[-1]) for x in (rows, cotangent)]
        wide = jnp.promote_types(cotangent.dtype, jnp.float32)
        if self.widens:
            flat = [x.astype(wide) for x in flat]
        precision, numbers = self.products[0].eqn.params["precision"], (((0,), (0,)), ((), ()))
        of_weight = lax.dot_general(flat[0], flat[1], numbers, precision, wide)
        weight, bias = like
        of_bias = None if bias is None else flat[1].astype(wide).sum(0).astype(bias.dtype)
        return of_weight.astype(weight.dtype), of_bias

    def of_all_positions(self, rows: Value, weight: Value, bias: Value | None) -> Value:
        """Return the joined product of the rows of all positions."""
        run: Any = jax.custom_vjp(lambda rows, weight, bias: self(rows, weight, bias))

        def backward(saved: Any, cotangent: Value) -> tuple[Any, ...]:
            rows, *like = saved
            (of_rows,) = jax.linear_transpose(lambda x: self(x, like[0], None), rows)(cotangent)
            return of_rows, *self.gradients(rows, cotangent, like)

        run.defvjp(lambda *saved: (self(*saved), saved), backward)
        flat = run(rows.reshape(-1, rows.shape[-1]), weight, bias)
        return flat.reshape(*rows.shape[:-1], flat.shape[-1])


@dataclass(frozen=True)
class _Loop:
    """A loop without what is computed before or after.

    Attributes:
        eqn: the loop.
        others: the equations of its body.
        groups: the products of its state.
        outside: its constants.
        inputs: the variables that are constants, carried, and sliced.
    """

    eqn: Equation
    others: Sequence[Equation]
    groups: Sequence[_Joined]
    outside: Environment
    inputs: tuple[Sequence[Var], Sequence[Var], Sequence[Var]]

    def run(self, weights: Any, rest: Any, taps: Sequence[Value] = ()) -> tuple[Any, Any]:
        """Return the results, and if there are taps the rows of products.

        Args:
            weights: and biases of the products.
            rest: all else that iterations read.
            taps: zeros for the results of products; their gradients are those of the results.
        """
        constants, carry, xs = rest
        outvars, count = self.eqn.params["jaxpr"].jaxpr.outvars, len(carry)

        def body(carry: list[Value], slices: Any) -> Any:
            env = self._inside([*constants, *carry, *slices[0]])
            rows = self._step(env, weights, slices[1])
            out = [env.value(atom) for atom in outvars]
            return out[:count], (out[count:], rows if taps else [])

        how = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        # All but products is recomputed: what is stacked costs a kernel each.
        body = jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
        carry, (ys, rows) = lax.scan(body, carry, (xs, taps), **how)
        return [*carry, *ys], rows

    def _inside(self, given: Sequence[Value]) -> Environment:
        """Return the environment of an iteration; weights are given in the parameter's dtype."""
        evaluator = self.outside.evaluator
        values = dict(zip(itertools.chain(*self.inputs), given, strict=True))
        prepared = {v: values[v] for v in self.inputs[0] if v in self.outside.prepared}
        for v, weight in prepared.items():
            values[v] = evaluator.weights.cast(weight, aval_of(v).dtype)
        return Environment(evaluator, values, prepared)

    def _step(self, env: Environment, weights: Any, taps: Sequence[Value]) -> list[Value]:
        """Evaluate an iteration, and return the rows that weights were multiplied with."""
        firsts = [group.products[0].eqn for group in self.groups]
        rows = list[Value]()
        done = {v for g in self.groups for p in g.products for v in (p.eqn.outvars[0], p.result)}
        for eqn in self.others:
            if eqn in firsts:
                number = firsts.index(eqn)
                rows.append(env.read(eqn.invars[0]))
                joined = self.groups[number](rows[-1], *weights[number])
                joined = _tapped(joined, taps[number]) if taps else joined
                env.values.update(self.groups[number].parts(joined))
            elif done.isdisjoint(eqn.outvars):
                env.evaluator.equations([eqn], env)
        return rows


@jax.custom_vjp
def _tapped(value: Value, tap: Value) -> Value:
    del tap
    return value


_tapped.defvjp(lambda value, tap: (value, None), lambda _, cotangent: (cotangent, cotangent))


def _with_gradients_after(loop: _Loop) -> Any:
    """Return (weights of products, all else it reads) → results."""

    def forward(weights: Any, rest: Any) -> tuple[list[Value], Any]:
        taps = [group.zeros(loop.eqn.params["length"]) for group in loop.groups]
        results, pull, rows = jax.vjp(partial(loop.run, weights), rest, taps, has_aux=True)
        return results, (pull, rows, weights)

    def backward(saved: Any, cotangents: Any) -> tuple[Any, Any]:
        pull, rows, weights = saved
        of_rest, of_taps = pull(cotangents)
        parts = zip(loop.groups, rows, of_taps, weights, strict=True)
        return [group.gradients(x, tap, like) for group, x, tap, like in parts], of_rest

    run = jax.custom_vjp(lambda weights, rest: loop.run(weights, rest)[0])
    run.defvjp(forward, backward)
    return run
