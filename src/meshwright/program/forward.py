"""The traced loss on a mesh: weights gathered, activations pinned, blocks rematerialized."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.program.gather import GatherSpecs, ready
from meshwright.program.grouped import GroupedLayout, is_grouped
from meshwright.program.interpret import Environment, Interpreter, ScanBody
from meshwright.program.jaxprs import (
    REARRANGES,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    aval_of,
    bind,
    scan_counts,
)
from meshwright.program.products import HALF, PRODUCTS, use_weight
from meshwright.program.remat import Remat
from meshwright.program.rolled import casts_of
from meshwright.program.segments import Segment, Unit, cut
from meshwright.program.trace import LossValue, TracedLoss
from meshwright.program.widen import Widening

_ADDS = frozenset({"add", "sub"})
"""Primitives that repeat an operand with dims of size 1, and whose gradients need no operand."""


class Forward:
    """The loss as a function of the step's leaves and a batch, on a mesh.

    Args:
        traced: the traced loss.
        mesh: where it runs.
        pins: layouts of activations.
        weights: variables that hold weights and no data.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp.
        whole: by number of the step leaf, its layout when gathered.
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
        whole: Sequence[PartitionSpec],
        remat: Remat,
        wide: bool = False,
    ) -> None:
        self.traced = traced
        jaxpr = traced.closed.jaxpr
        uses = weight_uses(traced, gathers, whole)
        kind = WideOnMesh if wide else OnMesh
        self._pieces = cut(jaxpr)
        self._make = lambda: kind(mesh, pins, weights, uses, remat)

    def __call__(self, leaves: Sequence[Any], batch: Sequence[Any]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        outputs = self._make().program(self.traced.closed, self._pieces, [*leaves, *batch])
        return self.traced.read_outputs(outputs)


@dataclass(frozen=True)
class WeightUse:
    """How a variable stands for a parameter.

    Attributes:
        leaf: the parameter's own variable.
        dtype: the compute format it is cast to; None for its own.
        specs: how it is gathered; None if it is whole already.
        whole: its layout when gathered.
        trained: whether it has a gradient.
    """

    leaf: Var
    dtype: Any
    specs: GatherSpecs | None
    whole: PartitionSpec
    trained: bool


def weight_uses(
    traced: TracedLoss, gathers: Mapping[int, GatherSpecs], whole: Sequence[PartitionSpec]
) -> dict[Var, WeightUse]:
    """Find the variables that stand for parameters: the leaves and their casts."""
    jaxpr = traced.closed.jaxpr
    uses = {
        variable: WeightUse(
            variable, None, gathers.get(number), whole[number], step.leaf.role == "param"
        )
        for number, (variable, step) in enumerate(
            zip(jaxpr.invars, traced.layout.step_leaves, strict=False)
        )
        if step.leaf.is_weight
    }
    casts = casts_of(jaxpr.eqns, set(uses))
    return uses | {
        other: replace(uses[leaf], dtype=aval_of(other).dtype) for other, leaf in casts.items()
    }


class OnMesh(Interpreter):
    """Evaluates a program on a mesh.

    Weights are made ready for use where they are first read, or inside each block that reads them.
    A weight in half precision is ready as float32 numbers that hold half-precision values: what
    reads them reads half precision, and their gradients stay float32 on the way back. They stay
    ready while they are only rearranged: the gradient of a bias is the sum of what it was repeated
    for, over samples on all devices.
    """

    def __init__(
        self,
        mesh: Mesh,
        pins: Mapping[Var, PartitionSpec],
        weights: Collection[Var],
        uses: Mapping[Var, WeightUse],
        remat: Remat,
    ) -> None:
        self._platform: str = mesh.devices.flat[0].platform
        # Inside a `shard_map`, constraints name the mesh with the axes that are divided by hand.
        here: Any = jax.sharding.get_abstract_mesh()
        self._mesh: Any = here if here.manual_axes else mesh
        self._free = {
            axis: size for axis, size in mesh.shape.items() if axis not in here.manual_axes
        }
        self._pins = {v: NamedSharding(self._mesh, spec) for v, spec in pins.items()}
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
        unrounded = {self._weight_operand(eqn), *self._held(eqn)}
        if self._rearranged(eqn):
            unrounded.add(0)
        shape = aval_of(eqn.outvars[0]).shape if eqn.primitive.name in _ADDS else None
        return [
            self._stack(atom, env)
            if number in stacked
            else self._operand(atom, env, shape, as_weight=number in unrounded)
            for number, atom in enumerate(eqn.invars)
        ]

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate an equation; where weights are used, their gradients are summed in float32."""
        if is_grouped(eqn):
            layout = GroupedLayout(eqn, self._free)
            if layout.needed:
                laid = layout.operands(args[0], args[1], self._mesh)
                return [layout.result(out, self._mesh) for out in self._evaluated(eqn, laid)]
        return self._evaluated(eqn, args)

    def _evaluated(self, eqn: Equation, args: list[Any]) -> list[Any]:
        if self._rearranged(eqn):
            widens = eqn.primitive.name == "convert_element_type"
            return self._stay_ready(eqn, args if widens else bind(eqn, args))
        weight = self._weight_operand(eqn)
        if weight is None:
            return super().leaf(eqn, args)
        is_lookup = eqn.primitive.name == "gather"
        use = self._uses.get(cast(Var, eqn.invars[weight]))
        whole = None if use is None else NamedSharding(self._mesh, use.whole)
        # Rows that no data chooses, such as those of positions, are weights still.
        stays = is_lookup and eqn.outvars[0] in self._weights
        results = use_weight(
            eqn,
            args,
            weight,
            whole=whole if is_lookup else None,
            widen_first=self._platform == "cpu",
            rounds=not stays,
        )
        return self._stay_ready(eqn, results) if stays else results

    def _stay_ready(self, eqn: Equation, results: Sequence[Any]) -> list[Any]:
        """Remember what an equation made of a weight, and return it rounded as it was traced."""
        self._ready[eqn.outvars[0]] = results[0]
        return [results[0].astype(aval_of(eqn.outvars[0]).dtype)]

    def scan_body(self, eqn: Equation, consts: list[Any]) -> ScanBody:
        """Return a scan's body; a stack of layers gathers each layer's weights in its turn."""
        stacked, held = self._scanned_over(eqn), self._held(eqn)
        if not stacked and not held:
            return super().scan_body(eqn, consts)
        _, num_carry = scan_counts(eqn)
        closed: ClosedJaxpr = eqn.params["jaxpr"]
        invars = closed.jaxpr.invars
        rounded = [
            value if number not in held else value.astype(aval_of(invars[number]).dtype)
            for number, value in enumerate(consts)
        ]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            operands = [*rounded, *carry, *xs]
            weights = {invars[n]: self._layer(use, operands[n]) for n, use in stacked.items()}
            weights |= {invars[number]: consts[number] for number in held}
            with self._own(weights):
                out = self.run(closed, operands)
            return out[:num_carry], out[num_carry:]

        if self._remat.policy is None or not stacked:
            return body
        return jax.checkpoint(body, policy=self._remat.policy, prevent_cse=False)

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

    def _operand(
        self, atom: Var | Literal, env: Environment, shape: Any = None, *, as_weight: bool
    ) -> Any:
        if isinstance(atom, Literal) or (atom not in self._uses and atom not in self._ready):
            return self.read(atom, env)
        value = self._use(atom, env)
        if shape is not None and self._is_ready_half(atom):
            # Repeated before it is rounded, so that what comes back is widened before it is summed.
            value = jnp.broadcast_to(value, shape)
        return value if as_weight else self._rounded(value, aval_of(atom).dtype)

    def _use(self, variable: Var, env: Environment) -> Any:
        """Return a weight ready for use, made ready once."""
        if variable not in self._ready:
            use = self._uses[variable]
            self._ready[variable] = self._make_ready(
                env[use.leaf], use.dtype, use.specs, trained=use.trained
            )
        return self._ready[variable]

    def _stack(self, atom: Any, env: Environment) -> Any:
        """Return a stack of layers to scan over: divided, or gathered at once."""
        return env[self._uses[atom].leaf] if self._remat.gather_inside else self._use(atom, env)

    def _layer(self, use: WeightUse, piece: Any) -> Any:
        """Return one layer of a stack, ready for use."""
        if not self._remat.gather_inside:
            return piece
        specs = use.specs.per_layer() if use.specs else None
        return self._make_ready(piece, use.dtype, specs, trained=use.trained)

    def _make_ready(
        self, value: Any, dtype: Any, specs: GatherSpecs | None, *, trained: bool = True
    ) -> Any:
        return ready(value, self._mesh, dtype=dtype, specs=specs, trained=trained)

    def _rounded(self, value: Any, dtype: Any) -> Any:
        return value.astype(dtype)

    def _is_cast(self, variable: Var) -> bool:
        return variable in self._uses and self._uses[variable].dtype is not None

    def _scanned_over(self, eqn: Equation) -> dict[int, WeightUse]:
        """Return which operands of a scan are stacks of weights it runs through."""
        if eqn.primitive.name != "scan":
            return {}
        first = sum(scan_counts(eqn))
        return {
            number: self._uses[atom]
            for number, atom in enumerate(eqn.invars)
            if number >= first and not isinstance(atom, Literal) and atom in self._uses
        }

    def _held(self, eqn: Equation) -> set[int]:
        """Return which operands of a scan are half-precision weights that every turn reads."""
        if eqn.primitive.name != "scan":
            return set()
        num_consts, _ = scan_counts(eqn)
        return {n for n, atom in enumerate(eqn.invars[:num_consts]) if self._is_ready_half(atom)}

    def _rearranged(self, eqn: Equation) -> bool:
        """Whether an equation only rearranges a half-precision weight, or widens it."""
        name = eqn.primitive.name
        if name == "convert_element_type":
            return eqn.params["new_dtype"] == jnp.float32 and self._is_ready_half(eqn.invars[0])
        return name in REARRANGES and self._is_ready_half(eqn.invars[0])

    def _is_ready_half(self, atom: Var | Literal) -> bool:
        if isinstance(atom, Literal) or aval_of(atom).dtype not in HALF:
            return False
        return atom in self._ready or self._is_cast(atom)

    def _weight_operand(self, eqn: Equation) -> int | None:
        """Return which operand of a lookup or a half-precision product is the weight."""
        name = eqn.primitive.name
        if name == "mul":
            shape = aval_of(eqn.outvars[0]).shape
            scales = [n for n, atom in enumerate(eqn.invars) if self._is_ready_half(atom)]
            repeated = [n for n in scales if aval_of(eqn.invars[n]).shape != shape]
            return repeated[0] if len(scales) == len(repeated) == 1 else None
        in_half = name in PRODUCTS and aval_of(eqn.outvars[0]).dtype in HALF
        if name != "gather" and not in_half:
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


class WideOnMesh(OnMesh, Widening):
    """The same in float64: nothing is rounded."""

    def _make_ready(
        self, value: Any, dtype: Any, specs: GatherSpecs | None, *, trained: bool = True
    ) -> Any:
        return super()._make_ready(value, None, specs, trained=trained)

    def _rounded(self, value: Any, dtype: Any) -> Any:
        return value

    def _weight_operand(self, eqn: Equation) -> int | None:
        return None

    def _is_ready_half(self, atom: Var | Literal) -> bool:
        return False
