"""The traced loss on a mesh: weights gathered, activations pinned, blocks rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.program.gather import GATHERED, GatherSpecs, ready
from meshwright.program.interpret import Environment, Interpreter
from meshwright.program.jaxprs import ClosedJaxpr, Equation, Literal, Var, aval_of, scan_counts
from meshwright.program.products import HALF, USES, use_weight
from meshwright.program.rolled import casts_of
from meshwright.program.segments import Segment, Unit, cut
from meshwright.program.trace import LossValue, TracedLoss
from meshwright.program.widen import Widening


@dataclass(frozen=True)
class Remat:
    """What of a block is kept for its backward pass.

    Attributes:
        policy: JAX checkpoint policy; None keeps everything.
        gather_inside: whether weights are gathered again for the backward pass.
    """

    policy: Callable[..., Any] | None = None
    gather_inside: bool = False


def choose_remat(kind: str, *, keep_gathered: bool) -> Remat:
    """Return the checkpoint policy for a kind of remat and a lifetime of gathered weights."""
    policies = jax.checkpoint_policies
    if kind == "full":
        return Remat(policies.nothing_saveable, not keep_gathered)
    if kind == "dots":
        return Remat(policies.dots_with_no_batch_dims_saveable, not keep_gathered)
    if keep_gathered:
        return Remat()
    return Remat(_all_but_gathered, gather_inside=True)


def _all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keep everything except gathered weights.

    Neither constraints nor casts to a wider format are kept: what they were applied to is no
    larger, and for weights it is their divided form.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name == "convert_element_type":
        return params["new_dtype"].itemsize <= inputs[0].dtype.itemsize
    return primitive.name != "sharding_constraint"


class Forward:
    """The loss as a function of the step's leaves and a batch, on a mesh.

    Args:
        traced: the traced loss.
        mesh: where it runs.
        pins: layouts of activations.
        weights: variables that hold weights and no data.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp.
        remat: what blocks keep for their backward pass.
        wide: hold every float as float64.
    """

    def __init__(
        self,
        traced: TracedLoss,
        *,
        mesh: Mesh,
        pins: Mapping[Var, PartitionSpec],
        weights: Collection[Var],
        gathers: Mapping[int, GatherSpecs],
        remat: Remat,
        wide: bool = False,
    ) -> None:
        self.traced = traced
        jaxpr = traced.closed.jaxpr
        uses = _weight_uses(traced, gathers)
        kind = _WideOnMesh if wide else _OnMesh
        self._pieces = cut(jaxpr)
        self._make = lambda: kind(mesh, pins, weights, uses, remat)

    def __call__(self, leaves: Sequence[Any], batch: Sequence[Any]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        outputs = self._make().program(self.traced.closed, self._pieces, [*leaves, *batch])
        return self.traced.read_outputs(outputs)


@dataclass(frozen=True)
class _WeightUse:
    """How a variable stands for a parameter.

    Attributes:
        leaf: the parameter's own variable.
        dtype: the compute format it is cast to; None for its own.
        specs: how it is gathered; None if it is whole already.
    """

    leaf: Var
    dtype: Any
    specs: GatherSpecs | None


def _weight_uses(traced: TracedLoss, gathers: Mapping[int, GatherSpecs]) -> dict[Var, _WeightUse]:
    jaxpr = traced.closed.jaxpr
    uses = {
        variable: _WeightUse(variable, None, gathers.get(number))
        for number, (variable, step) in enumerate(
            zip(jaxpr.invars, traced.layout.step_leaves, strict=False)
        )
        if step.leaf.role == "param"
    }
    casts = casts_of(jaxpr.eqns, set(uses))
    return uses | {
        cast: _WeightUse(leaf, aval_of(cast).dtype, uses[leaf].specs)
        for cast, leaf in casts.items()
    }


class _OnMesh(Interpreter):
    """Evaluates a program on a mesh.

    Weights are made ready for use where they are first read, or inside each block that reads them.
    A weight in half precision is ready as float32 numbers that hold half-precision values: products
    read them as half precision, and their gradients stay float32 on the way back.
    """

    def __init__(
        self,
        mesh: Mesh,
        pins: Mapping[Var, PartitionSpec],
        weights: Collection[Var],
        uses: Mapping[Var, _WeightUse],
        remat: Remat,
    ) -> None:
        self._mesh = mesh
        self._pins = {v: NamedSharding(mesh, spec) for v, spec in pins.items()}
        self._weights = weights
        self._uses = uses
        self._remat = remat
        self._ready: dict[Var, Any] = {}

    def program(
        self, closed: ClosedJaxpr, pieces: Sequence[Segment], args: Sequence[Any]
    ) -> list[Any]:
        """Evaluate the whole program, piece by piece."""
        env: Environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))
        for piece in pieces:
            if isinstance(piece, Unit) and self._remat.policy is not None:
                self._unit(piece, env)
            else:
                self.equations(piece.eqns, env)
        return [self.read(atom, env) for atom in closed.jaxpr.outvars]

    def equation(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate one equation and pin its results."""
        results = super().equation(eqn, args)
        return [
            jax.lax.with_sharding_constraint(value, self._pins[variable])
            if variable in self._pins
            else value
            for variable, value in zip(eqn.outvars, results, strict=True)
        ]

    def operands(self, eqn: Equation, env: Environment) -> list[Any]:
        """Return what an equation works on, weights ready for use."""
        if eqn.outvars and self._is_cast(eqn.outvars[0]):
            return [self.read(atom, env) for atom in eqn.invars]
        stacked = self._scanned_over(eqn)
        weight = self._weight_operand(eqn)
        return [
            self._stack(atom, env)
            if number in stacked
            else self._operand(atom, env, as_weight=number == weight)
            for number, atom in enumerate(eqn.invars)
        ]

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate an equation; where weights are used, their gradients are summed in float32."""
        weight = self._weight_operand(eqn)
        return super().leaf(eqn, args) if weight is None else use_weight(eqn, args, weight)

    def enter_scan(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a scan; a stack of layers gathers each layer's weights when its turn comes."""
        stacked = self._scanned_over(eqn)
        if not stacked:
            return super().enter_scan(eqn, args)
        num_consts, num_carry = scan_counts(eqn)
        consts, init = args[:num_consts], args[num_consts : num_consts + num_carry]
        closed: ClosedJaxpr = eqn.params["jaxpr"]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            operands = [*consts, *carry, *xs]
            layer = {
                closed.jaxpr.invars[number]: self._layer(use, operands[number])
                for number, use in stacked.items()
            }
            with self._own(layer):
                out = self.run(closed, operands)
            return out[:num_carry], out[num_carry:]

        if self._remat.policy is not None:
            body = jax.checkpoint(body, policy=self._remat.policy, prevent_cse=False)
        carry, ys = jax.lax.scan(
            body,
            init,
            args[num_consts + num_carry :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *ys]

    def _unit(self, unit: Unit, env: Environment) -> None:
        """Evaluate a block under its checkpoint policy."""
        inside = self._remat.gather_inside
        arguments = [
            self.read(v, env)
            if v not in self._uses
            else env[self._uses[v].leaf]
            if inside
            else self._use(v, env)
            for v in unit.reads
        ]

        def run(*values: Any) -> list[Any]:
            inner: Environment = {}
            given: dict[Var, Any] = {}
            for variable, value in zip(unit.reads, values, strict=True):
                if variable not in self._uses:
                    inner[variable] = value
                elif inside:
                    inner[self._uses[variable].leaf] = value
                else:
                    given[variable] = value
            with self._own(given):
                self.equations(unit.eqns, inner)
            return [inner[v] for v in unit.results]

        results = jax.checkpoint(run, policy=self._remat.policy)(*arguments)
        env.update(zip(unit.results, results, strict=True))

    def _operand(self, atom: Var | Literal, env: Environment, *, as_weight: bool) -> Any:
        if isinstance(atom, Literal) or (atom not in self._uses and atom not in self._ready):
            return self.read(atom, env)
        value = self._use(atom, env)
        return value if as_weight else self._rounded(value, aval_of(atom).dtype)

    def _use(self, variable: Var, env: Environment) -> Any:
        """Return a weight ready for use, made ready once."""
        if variable not in self._ready:
            use = self._uses[variable]
            self._ready[variable] = self._make_ready(env[use.leaf], use.dtype, use.specs)
        return self._ready[variable]

    def _stack(self, atom: Any, env: Environment) -> Any:
        """Return a stack of layers to scan over: divided, or gathered at once."""
        return env[self._uses[atom].leaf] if self._remat.gather_inside else self._use(atom, env)

    def _layer(self, use: _WeightUse, piece: Any) -> Any:
        """Return one layer of a stack, ready for use."""
        if not self._remat.gather_inside:
            return piece
        return self._make_ready(piece, use.dtype, use.specs.per_layer() if use.specs else None)

    def _make_ready(self, value: Any, dtype: Any, specs: GatherSpecs | None) -> Any:
        return ready(value, self._mesh, dtype=dtype, specs=specs)

    def _rounded(self, value: Any, dtype: Any) -> Any:
        return value.astype(dtype)

    def _is_cast(self, variable: Var) -> bool:
        return variable in self._uses and self._uses[variable].dtype is not None

    def _scanned_over(self, eqn: Equation) -> dict[int, _WeightUse]:
        """Return which operands of a scan are stacks of weights it runs through."""
        if eqn.primitive.name != "scan":
            return {}
        first = sum(scan_counts(eqn))
        return {
            number: self._uses[atom]
            for number, atom in enumerate(eqn.invars)
            if number >= first and not isinstance(atom, Literal) and atom in self._uses
        }

    def _weight_operand(self, eqn: Equation) -> int | None:
        """Return which operand of a half-precision product or lookup is the weight."""
        if eqn.primitive.name not in USES or aval_of(eqn.outvars[0]).dtype not in HALF:
            return None
        found = [
            number
            for number, atom in enumerate(eqn.invars)
            if not isinstance(atom, Literal) and (atom in self._weights or atom in self._ready)
        ]
        return found[0] if len(found) == 1 else None

    @contextmanager
    def _own(self, known: dict[Var, Any]) -> Generator[None]:
        """Let a block make its weights ready for itself, so that they are forgotten with it."""
        outside = self._ready
        self._ready = known
        try:
            yield
        finally:
            self._ready = outside


class _WideOnMesh(_OnMesh, Widening):
    """The same in float64: nothing is rounded."""

    def _make_ready(self, value: Any, dtype: Any, specs: GatherSpecs | None) -> Any:
        return super()._make_ready(value, None, specs)

    def _rounded(self, value: Any, dtype: Any) -> Any:
        return value

    def _weight_operand(self, eqn: Equation) -> int | None:
        return None
