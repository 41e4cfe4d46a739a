"""Weights that loops read: their gradients are added up on each device and reduced once.

The gradient of a weight that a scan reads in every iteration is a sum over iterations and over
samples. The partitioner would reduce each iteration's part over the devices before it is added.
Instead, every device gets a copy of the weight: one row of an array whose rows are divided over the
devices. Operations that read it run on a device's own samples and its own row. The gradients of the
rows are added up in the loop, where nothing is sent, and the rows are summed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import (
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    called_jaxpr,
    name_stack,
    scan_counts,
)
from meshwright.program.on_mesh.loop_reads import LoopRead, LoopReads
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype, record_prepared

Run = Callable[..., list[Value]]
"""A function of the arrays that an equation reads."""

Copies = dict[int, Value]
"""What an operation reads instead of its weights, by number of the operand."""


@dataclass(frozen=True, eq=False)
class LoopWeights:
    """Gives every device its own copy of the weights that a loop reads.

    Attributes:
        mesh: where the program runs.
        reads: the operations that read weights in loops.
        copies: while a loop is evaluated, the copies for its reads, by first result.
    """

    mesh: MeshView
    reads: LoopReads
    copies: dict[Var, Copies] = field(default_factory=dict[Var, Copies])

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a loop, or a read inside of one; None for other equations."""
        if not self.reads.by_result or not eqn.outvars:
            return None
        if eqn.primitive.name == "scan":
            return self._loop(eqn, env)
        copies = self.copies.get(eqn.outvars[0])
        return self._read(eqn, env, copies) if copies else None

    def _loop(self, eqn: Equation, env: Environment) -> list[Value]:
        new: dict[Var, Copies] = {}
        for program, arguments in _programs(eqn):
            self._prepare(program, arguments, env, new)
        self.copies.update(new)
        try:
            return env.evaluator.continue_after(self, eqn, env)
        finally:
            for variable in new:
                del self.copies[variable]

    def _prepare(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Atom],
        outer: Environment,
        new: dict[Var, Copies],
    ) -> None:
        """Copy the weights that a nested program reads, before the loop that runs it.

        What the program computes from weights alone is computed here, and then copied.

        Args:
            closed: the program.
            arguments: its first inputs in ``outer``; the others are no weights.
            outer: has the values of weights that are known outside of the program.
            new: where the copies are added, by first result of the read.
        """
        env = _weights_inside(closed, arguments, outer)
        rows: dict[tuple[Atom, bool], Value] = {}
        for eqn in closed.jaxpr.eqns if env.values else ():
            first = eqn.outvars[0] if eqn.outvars else None
            if first in self.reads.by_result and first not in self.copies:
                new[first] = self._copies(eqn, env, rows)
            for program, inner in _programs(eqn):
                self._prepare(program, inner, env, new)
            if first in env.evaluator.weights.weight_only and all(
                isinstance(atom, Literal) or atom in env.values for atom in eqn.invars
            ):
                env.evaluator.equations([eqn], env)

    def _copies(
        self, eqn: Equation, env: Environment, rows: dict[tuple[Atom, bool], Value]
    ) -> Copies:
        """Return copies of the weights that one equation reads; ``rows`` has those made before."""
        copies: Copies = {}
        in_param_dtype = operands_in_param_dtype(eqn, env)
        for number in self.reads.by_result[eqn.outvars[0]].weights:
            atom, unrounded = eqn.invars[number], number in in_param_dtype
            if isinstance(atom, Literal) or atom not in env.values:
                continue
            if (atom, unrounded) not in rows:
                weight = env.in_param_dtype(atom) if unrounded else env.read(atom)
                with jax.named_scope(name_stack(eqn)):
                    rows[atom, unrounded] = self._rows(weight)
            copies[number] = rows[atom, unrounded]
        return copies

    def _rows(self, weight: Value) -> Value:
        """Return a weight once for each part of the samples, in rows divided like these."""
        rows = jnp.broadcast_to(weight, (self.reads.parts, *weight.shape))
        free = [PartitionSpec.UNCONSTRAINED] * weight.ndim
        spec = PartitionSpec(tuple(self.reads.batch_axes), *free)
        return jax.lax.with_sharding_constraint(rows, self.mesh.sharding(spec))

    def _read(self, eqn: Equation, env: Environment, copies: Copies) -> list[Value]:
        """Evaluate a read, each part of the samples with its own copy of the weights."""
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        repeats = eqn.primitive.name == "broadcast_in_dim"
        local = _for_part(eqn, self._layouts(eqn), self.reads.parts) if repeats else eqn
        arrays = [n for n, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]

        def run(*parts: Value) -> list[Value]:
            own = list(operands)
            for number, part in zip(arrays, parts, strict=True):
                own[number] = part
            if repeats:
                return env.evaluator.numerics.bind(local, own)
            return env.evaluator.continue_after(self, eqn, env.with_operands(eqn, own))

        # A vectorized convolution is a grouped one, see `grouped_convolutions`.
        on_parts = self._on_devices if eqn.primitive.name == "conv_general_dilated" else self._on_rows
        results = on_parts(run, eqn, env, {n: copies.get(n, operands[n]) for n in arrays}, copies)
        half = repeats and env.is_half_weight(eqn.invars[0])
        return record_prepared(eqn, results, env) if half else results

    def _layouts(self, eqn: Equation) -> LoopRead:
        return self.reads.by_result[eqn.outvars[0]]

    def _on_rows(
        self, run: Run, eqn: Equation, env: Environment, arrays: Copies, copies: Copies
    ) -> list[Value]:
        """Run a function of an equation's operands on each row, vectorized."""
        read = self._layouts(eqn)
        dims = [0 if n in copies else _sample_dim(read.operands[n]) for n in arrays]
        rows = [
            value if n in copies or dim is None else self._split(value, dim, env)
            for (n, value), dim in zip(arrays.items(), dims, strict=True)
        ]
        out_dims = [_sample_dim(spec) for spec in read.results]
        results = jax.vmap(run, dims, out_dims)(*rows)
        return [_joined(x, dim) for x, dim in zip(results, out_dims, strict=True)]

    def _split(self, value: Value, dim: int, env: Environment) -> Value:
        """Return samples in rows; those that read the same value add their gradients in rows."""
        if id(value) not in env.copies:
            shape = value.shape
            size = shape[dim] // self.reads.parts
            rows = value.reshape(*shape[:dim], self.reads.parts, size, *shape[dim + 1 :])
            free = [PartitionSpec.UNCONSTRAINED] * value.ndim
            spec = PartitionSpec(*free[:dim], tuple(self.reads.batch_axes), *free[dim:])
            env.copies[id(value)] = (value, jax.lax.with_sharding_constraint(rows, self.mesh.sharding(spec)))
        return env.copies[id(value)][1]

    def _on_devices(
        self, run: Run, eqn: Equation, env: Environment, arrays: Copies, copies: Copies
    ) -> list[Value]:
        """Run a function of an equation's operands on each device, in a `jax.shard_map`."""
        read, axes = self._layouts(eqn), tuple(self.reads.batch_axes)

        def on_device(*parts: Value) -> tuple[Value, ...]:
            pairs = zip(arrays, parts, strict=True)
            return tuple(run(*(part[0] if n in copies else part for n, part in pairs)))

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh.mesh,
            in_specs=tuple(PartitionSpec(axes) if n in copies else read.operands[n] for n in arrays),
            out_specs=read.results,
            axis_names=set(axes),
            check_vma=False,
        )
        return list(mapped(*arrays.values()))


def _sample_dim(spec: PartitionSpec) -> int | None:
    return next((dim for dim, axes in enumerate(spec) if axes is not None), None)


def _joined(value: Value, dim: int | None) -> Value:
    """Return an array whose samples are in rows with the samples in one dim again."""
    assert dim is not None
    shape = value.shape
    return value.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _programs(eqn: Equation) -> Iterator[tuple[ClosedJaxpr, Sequence[Atom]]]:
    """Yield the programs that an equation runs, with those arguments that stay as they are."""
    name = eqn.primitive.name
    if name == "scan":
        yield eqn.params["jaxpr"], eqn.invars[: scan_counts(eqn)[0]]
    elif name == "cond":
        yield from ((branch, eqn.invars[1:]) for branch in eqn.params["branches"])
    elif name in REMATS:
        yield called_jaxpr(eqn), eqn.invars


def _weights_inside(
    closed: ClosedJaxpr, arguments: Sequence[Atom], outer: Environment
) -> Environment:
    """Return the environment of a nested program, with its arguments that are weights."""
    env = Environment(outer.evaluator, {})
    for variable, atom in zip(closed.jaxpr.invars, arguments, strict=False):
        known = not isinstance(atom, Literal) and atom in outer.values
        if not known or variable not in outer.evaluator.weights.weight_only:
            continue
        env.values[variable] = outer.read(atom)
        if outer.is_half_weight(atom):
            env.prepared[variable] = outer.in_param_dtype(atom)
    return env


def _for_part(eqn: Equation, read: LoopRead, parts: int) -> Equation:
    """Return a broadcast to the samples of one device."""
    shape = [
        size if axes is None else size // parts
        for size, axes in zip(eqn.params["shape"], read.results[0], strict=True)
    ]
    return eqn.replace(params={**eqn.params, "shape": tuple(shape)})
