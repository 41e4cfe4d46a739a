"""The traced loss on a mesh: weights gathered, activations pinned, blocks rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.program.gather import GATHERED, gather
from meshwright.program.interpret import Environment, Interpreter
from meshwright.program.jaxprs import ClosedJaxpr, Equation, Literal, Var, scan_counts
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


@dataclass(frozen=True)
class GatherSpecs:
    """The two layouts of a weight that is divided over fsdp: whole for use, divided at rest."""

    whole: PartitionSpec
    divided: PartitionSpec


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


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep everything except gathered weights.

    A constraint is never kept: it moves what it constrains, so keeping what it was applied to
    costs the same for activations, and for weights it is their divided form.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    return primitive.name != "sharding_constraint"


class Forward:
    """The loss as a function of the step's leaves and a batch, on a mesh.

    Args:
        traced: the traced loss.
        mesh: where it runs.
        pins: layouts of activations.
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
        gathers: Mapping[int, GatherSpecs],
        remat: Remat,
        wide: bool = False,
    ) -> None:
        self.traced = traced
        kind = _WideOnMesh if wide else _OnMesh
        jaxpr = traced.closed.jaxpr
        count = len(traced.layout.step_leaves)
        casts = casts_of(jaxpr.eqns, set(jaxpr.invars[:count]))
        by_var = {jaxpr.invars[i]: specs for i, specs in gathers.items()}
        by_var |= {cast: by_var[leaf] for cast, leaf in casts.items() if leaf in by_var}
        params = {
            variable
            for variable, step in zip(jaxpr.invars, traced.layout.step_leaves, strict=False)
            if step.leaf.role == "param"
        }
        params |= {cast for cast, leaf in casts.items() if leaf in params}
        self._pieces = cut(jaxpr)
        self._make = lambda: kind(mesh, pins, by_var, params, set(casts), remat)

    def __call__(self, leaves: Sequence[Any], batch: Sequence[Any]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        outputs = self._make().program(self.traced.closed, self._pieces, [*leaves, *batch])
        return self.traced.read_outputs(outputs)


class _OnMesh(Interpreter):
    def __init__(
        self,
        mesh: Mesh,
        pins: Mapping[Var, PartitionSpec],
        gathers: Mapping[Var, GatherSpecs],
        params: set[Var],
        casts: set[Var],
        remat: Remat,
    ) -> None:
        self._mesh = mesh
        self._pins = {v: NamedSharding(mesh, spec) for v, spec in pins.items()}
        self._gathers = gathers
        self._params = params
        self._casts = casts
        self._remat = remat
        self._gathered: dict[Var, Any] = {}

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
        return [super(_OnMesh, self).read(atom, env) for atom in closed.jaxpr.outvars]

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
        """Return what an equation works on, weights gathered unless it takes them divided."""
        if eqn.outvars and eqn.outvars[0] in self._casts:
            return [self.read(atom, env) for atom in eqn.invars]
        divided = self._scanned_over(eqn) if self._remat.gather_inside else set[int]()
        return [
            self.read(atom, env) if number in divided else self._whole(atom, self.read(atom, env))
            for number, atom in enumerate(eqn.invars)
        ]

    def enter_scan(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a scan; a stack of layers gathers each layer's weights when its turn comes."""
        stacked = self._scanned_over(eqn)
        if not stacked or self._remat.policy is None:
            return super().enter_scan(eqn, args)
        num_consts, num_carry = scan_counts(eqn)
        consts, init = args[:num_consts], args[num_consts : num_consts + num_carry]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            with self._own_gathers():
                operands = [*consts, *carry, *xs]
                for number in stacked if self._remat.gather_inside else ():
                    variable = eqn.invars[number]
                    if not isinstance(variable, Literal) and variable in self._gathers:
                        specs = self._gathers[variable]
                        operands[number] = self._gather(operands[number], _per_layer(specs))
                out = self.run(eqn.params["jaxpr"], operands)
            return out[:num_carry], out[num_carry:]

        carry, ys = jax.lax.scan(
            jax.checkpoint(body, policy=self._remat.policy, prevent_cse=False),
            init,
            args[num_consts + num_carry :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *ys]

    def _unit(self, unit: Unit, env: Environment) -> None:
        inside = self._remat.gather_inside
        arguments = [env[v] if inside else self._whole(v, env[v]) for v in unit.reads]

        def run(*values: Any) -> list[Any]:
            inner: Environment = dict(zip(unit.reads, values, strict=True))
            with self._own_gathers(dict(inner) if not inside else None):
                self.equations(unit.eqns, inner)
            return [inner[v] for v in unit.results]

        results = jax.checkpoint(run, policy=self._remat.policy)(*arguments)
        env.update(zip(unit.results, results, strict=True))

    def _scanned_over(self, eqn: Equation) -> set[int]:
        """Return which operands of a scan are stacks of weights it runs through."""
        if eqn.primitive.name != "scan":
            return set()
        first = sum(scan_counts(eqn))
        return {n for n, v in enumerate(eqn.invars) if n >= first and v in self._params}

    def _whole(self, atom: Var | Literal, value: Any) -> Any:
        if isinstance(atom, Literal) or atom not in self._gathers:
            return value
        if atom not in self._gathered:
            self._gathered[atom] = self._gather(value, self._gathers[atom])
        return self._gathered[atom]

    def _gather(self, value: Any, specs: GatherSpecs) -> Any:
        return gather(value, self._mesh, whole=specs.whole, divided=specs.divided)

    @contextmanager
    def _own_gathers(self, known: dict[Var, Any] | None = None) -> Generator[None]:
        """Let a block gather for itself, so that what it gathers can be forgotten with it."""
        outside = self._gathered
        self._gathered = dict(known or {})
        try:
            yield
        finally:
            self._gathered = outside


class _WideOnMesh(_OnMesh, Widening):
    """The same in float64."""


def _per_layer(specs: GatherSpecs) -> GatherSpecs:
    return GatherSpecs(PartitionSpec(*specs.whole[1:]), PartitionSpec(*specs.divided[1:]))
