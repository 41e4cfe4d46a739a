"""Weights that devices read copies of: gradients are added up on each device and reduced once.

The gradient of a weight that a scan reads in every iteration is a sum over iterations and over
samples. The partitioner would reduce each iteration's part over the devices before it is added.
Instead, every device gets a copy of the weight: one row of an array whose rows are sharded over the
devices. Operations that read it run on a device's own samples and its own row. The gradients of the
rows are added up in the loop, where nothing is sent, and the rows are summed after it. So are those
of what is larger than the weights it is computed from: only gradients of these are sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.program.evaluate.evaluator import Environment, Rows
from meshwright.program.evaluate.mesh_view import MeshView, run_locally
from meshwright.program.jaxpr.equations import (
    REMATS,
    Atom,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    name_stack,
)
from meshwright.program.jaxpr.walks import called_programs
from meshwright.program.on_mesh.loop_reads import LoopRead, LoopReads
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype, record_prepared

Run = Callable[..., list[Value]]
"""A function of the arrays that an equation reads."""


@dataclass(frozen=True, eq=False)
class LoopWeights:
    """Gives every device its own copy of the weights that a loop reads.

    Attributes:
        reads: the operations that read weights in loops.
        rows: while a loop is evaluated, the copies of its weights by variable of the loop's body.
            Those of weights in half precision may be in the parameter's dtype.
    """

    mesh: MeshView
    reads: LoopReads
    rows: dict[Var, Value] = field(default_factory=dict[Var, Value])

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a loop, or a read of copies; None for other equations."""
        if not self.reads.by_result or not eqn.outvars:
            return None
        if eqn.primitive.name in _WITH_PROGRAMS:
            return self._enter(eqn, env)
        if eqn.outvars[0] in self.reads.enlarged:
            own = self.reads.enlarged[eqn.outvars[0]]
            self._compute_rows(eqn, env, {v: self._copy(env.in_param_dtype(v)) for v in own})
        elif any(self._row(atom, env) is not None for atom in eqn.invars):
            read = self.reads.by_result.get(eqn.outvars[0])
            if read is not None:
                return self._read(eqn, env, read)
            if self.reads.weights.issuperset(eqn.outvars):
                self._compute_rows(eqn, env)
        return None

    def _enter(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate an equation that runs programs, in which the rows of its operands are known."""
        before = dict(self.rows)
        for closed, arguments in called_programs(eqn):
            for variable, atom in zip(closed.jaxpr.invars, arguments, strict=False):
                if isinstance(atom, Literal):
                    continue
                if (row := self._row(atom, env)) is not None:
                    self.rows[variable] = row
                elif eqn.primitive.name == "scan" and variable in self.reads.weights:
                    eqns = closed.jaxpr.eqns
                    first = next((name_stack(e) for e in eqns if variable in e.invars), "")
                    with jax.named_scope(first):
                        self.rows[variable] = self._copy(env.in_param_dtype(atom))
        try:
            return env.evaluator.continue_after(self, eqn, env)
        finally:
            self.rows.clear()
            self.rows.update(before)

    def _copy(self, weight: Value) -> Value:
        """Return a weight once for each part of the samples, in rows sharded like these."""
        rows = jnp.broadcast_to(weight, (self.reads.parts, *weight.shape))
        return self._sharded(rows, 0)

    def _sharded(self, value: Value, dim: int) -> Value:
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
        entries[dim] = tuple(self.reads.batch_axes)
        return jax.lax.with_sharding_constraint(value, self.mesh.sharding(PartitionSpec(*entries)))

    def _row(self, atom: Atom, env: Environment) -> Value | None:
        """Return the copies of a value, if there are any."""
        if isinstance(atom, Literal):
            return None
        computed = env.rows(atom)
        return self.rows.get(atom) if computed is None else computed.value

    def _compute_rows(
        self, eqn: Equation, env: Environment, given: Mapping[Var, Value] | None = None
    ) -> None:
        """Compute the rows of what an equation computes from weights alone, some of them given."""

        def run(*operands: Value) -> list[Value]:
            inner = env.with_operands(eqn, operands)
            inner.prepared = dict(env.prepared)
            results = env.evaluator.continue_after(self, eqn, inner)
            return [inner.prepared.get(v, x) for v, x in zip(eqn.outvars, results, strict=True)]

        operands, rows = self._operands(eqn, env, given)
        results = _for_each(run, operands, dict.fromkeys(rows, 0), 0)
        for variable, value in zip(eqn.outvars, results, strict=True):
            env.copies[Rows, variable] = Rows(value, tuple(self.reads.batch_axes))

    def _operands(
        self, eqn: Equation, env: Environment, given: Mapping[Var, Value] | None = None
    ) -> tuple[list[Value], list[int]]:
        """Return an equation's operands, and which of them are rows."""
        in_param_dtype, cast = operands_in_param_dtype(eqn, env), env.evaluator.weights.cast
        operands, rows = env.operands(eqn, in_param_dtype), list[int]()
        for number, atom in enumerate(eqn.invars):
            own = (
                None if isinstance(atom, Literal) else (given or {}).get(atom, self._row(atom, env))
            )
            if own is None:
                continue
            operands[number] = own if number in in_param_dtype else cast(own, aval_of(atom).dtype)
            rows.append(number)
        return operands, rows

    def _read(self, eqn: Equation, env: Environment, read: LoopRead) -> list[Value]:
        """Evaluate a read, each part of the samples with its own copy of the weights."""
        operands, rows = self._operands(eqn, env)
        if eqn.primitive.name == "broadcast_in_dim":
            shape = list(eqn.params["shape"])
            shape[read.result] //= self.reads.parts
            part = eqn.replace(params={**eqn.params, "shape": tuple(shape)})
            run: Run = lambda x: env.evaluator.numerics.bind(part, [x])  # noqa: E731
            results = self._on_rows(run, operands, rows, read, env)
            is_half = env.is_half_weight(eqn.invars[0])
            return record_prepared(eqn, results, env) if is_half else results

        def evaluate(*own: Value) -> list[Value]:
            return env.evaluator.continue_after(self, eqn, env.with_operands(eqn, own))

        # A vectorized convolution would be a grouped one, see `grouped_convolutions`.
        if eqn.primitive.name == "conv_general_dilated":
            return self._on_devices(evaluate, operands, rows, read)
        return self._on_rows(evaluate, operands, rows, read, env)

    def _on_rows(
        self, run: Run, operands: list[Value], rows: list[int], read: LoopRead, env: Environment
    ) -> list[Value]:
        """Run a function of an equation's operands on each row, vectorized."""
        dims = dict.fromkeys(rows, 0)
        for number, dim in enumerate(read.operands):
            if dim is not None:
                operands[number] = self._split(operands[number], dim, env)
                dims[number] = dim
        results = _for_each(run, operands, dims, read.result)
        dim = read.result
        return [x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]) for x in results]

    def _split(self, value: Value, dim: int, env: Environment) -> Value:
        """Return samples in rows; those who read the same value add up their gradients in rows."""
        if id(value) not in env.copies:
            shape = (*value.shape[:dim], self.reads.parts, -1, *value.shape[dim + 1 :])
            # The value as well, so that no other gets its id.
            env.copies[id(value)] = value, self._sharded(value.reshape(shape), dim)
        return env.copies[id(value)][1]

    def _on_devices(
        self, run: Run, operands: list[Value], rows: list[int], read: LoopRead
    ) -> list[Value]:
        """Run a function of an equation's operands on each device, in a `jax.shard_map`."""
        axes = tuple(self.reads.batch_axes)

        def sharded(dim: int | None) -> PartitionSpec:
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes)

        def on_device(*parts: Value) -> tuple[Value, ...]:
            return tuple(run(*(x[0] if n in rows else x for n, x in enumerate(parts))))

        specs = [sharded(0 if n in rows else dim) for n, dim in enumerate(read.operands)]
        return list(run_locally(on_device, operands, specs, (sharded(read.result),), self.mesh))


_WITH_PROGRAMS = frozenset({"scan", "cond", *REMATS})


def _for_each(run: Run, operands: list[Value], dims: dict[int, int], out_dim: int) -> list[Value]:
    """Run a function for each row of some operands, which are along these dims."""
    numbers = list(dims)

    def of_rows(*own: Value) -> list[Value]:
        return run(*(own[numbers.index(n)] if n in dims else x for n, x in enumerate(operands)))

    return jax.vmap(of_rows, tuple(dims.values()), out_dim)(*(operands[n] for n in numbers))
