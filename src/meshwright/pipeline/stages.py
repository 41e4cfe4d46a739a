"""The stages of a traced loss: embedding, blocks and head as functions, evaluated on the mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.pipeline.contract import Losses, Message, StageFunctions
from meshwright.pipeline.cut import BlockCut
from meshwright.pipeline.division import Division
from meshwright.pipeline.lookups import (
    SCATTERS,
    divided_rows,
    divides_rows,
    in_whole_dims,
    picked,
    picks_one,
)
from meshwright.pipeline.moving_dims import all_whole, moving_dims
from meshwright.program.forward import OnMesh, WeightUse, WideOnMesh, weight_uses
from meshwright.program.gather import GatherSpecs
from meshwright.program.interpret import Environment
from meshwright.program.jaxprs import Equation, Literal, Var, aval_of, scan_counts
from meshwright.program.local import LocalDraws
from meshwright.program.remat import Remat
from meshwright.program.widen import is_narrow


@dataclass(frozen=True)
class StageContext:
    """Where a traced loss runs.

    Attributes:
        mesh: the mesh.
        pins: layouts of activations.
        weights: variables that hold weights and no data.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp, on one stage.
        whole: by number of the step leaf, its layout when gathered, on one stage.
        remat: what blocks keep for their backward pass.
        wide: hold every float as float64.
        draws: for a loss of one device's samples, its random numbers; None for one of all samples.
    """

    mesh: Mesh
    pins: Mapping[Var, PartitionSpec]
    weights: Collection[Var]
    gathers: Mapping[int, GatherSpecs]
    whole: Sequence[PartitionSpec]
    remat: Remat
    wide: bool
    draws: LocalDraws | None = None

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which samples are divided by hand."""
        return () if self.draws is None else tuple(self.draws.batch_axes)


class Stages:
    """A cut loss as functions of leaf values.

    Args:
        cut: the loss and where it is cut.
        where: the mesh and what it asks for.
        division: how many blocks each virtual stage has.
    """

    def __init__(self, cut: BlockCut, where: StageContext, division: Division) -> None:
        self.cut, self.where, self.division = cut, where, division
        self.uses = weight_uses(cut.traced, where.gathers, where.whole)
        leaves = cut.traced.layout.step_leaves
        self.leaf_vars = cut.jaxpr.invars[: len(leaves)]
        self.batch_vars = cut.jaxpr.invars[len(leaves) :]
        trained = {n for n, step in enumerate(leaves) if step.leaf.role == "param"}
        self.weight_rows = [n for n, leaf in cut.stack_of.items() if leaf in trained]
        self.changing_rows = [n for n, leaf in cut.stack_of.items() if leaf in cut.changing]
        own = {*self.weight_rows, *self.changing_rows}
        self.fixed_rows = [n for n in cut.stack_of if n not in own]
        self.computed_rows = [n for n in range(len(cut.layered)) if n not in cut.stack_of]
        self.outer_params = [n for n in cut.outer if n in trained]
        self.embed_eqns, embed_leaves = cut.reads(cut.initial)
        self.extra_eqns, extra_leaves = cut.reads(cut.shared)
        self.head_eqns, head_leaves = cut.reads(cut.losses)
        self.embed_reads, self.blocks_read, self.head_reads = (
            [i for i, n in enumerate(self.outer_params) if n in found]
            for found in (embed_leaves, extra_leaves, head_leaves)
        )

    def prepare(self, stacks: Mapping[int, Any], rows: Sequence[int]) -> list[Any]:
        """Return what blocks read, row by row, for the values of the step leaves behind it.

        Weights are cast and gathered here, unless each block does so for itself.
        """
        interpreter = self._interpreter()
        return [
            interpreter.stack(self.uses.get(self.cut.layered[row]), stacks[self.cut.stack_of[row]])
            for row in rows
        ]

    def functions(self, frozen: Mapping[int, Any]) -> StageFunctions:
        """Return the stages; ``frozen`` holds step leaves outside of blocks that are not trained.

        Inputs of a microbatch are (batch leaves, values of `BlockCut.changed_outer`).
        """

        def embed(outer: list[Any], inputs: Any) -> Message:
            env = self._environment(frozen, self.embed_reads, outer, inputs)
            interpreter = self._interpreter()
            interpreter.equations(self.embed_eqns, env)
            carry = [interpreter.value(atom, env) for atom in self.cut.initial]
            return [*carry, *self._no_results(carry)]

        def head(outer: list[Any], message: Message, inputs: Any) -> Losses:
            env = self._environment(frozen, self.head_reads, outer, inputs)
            num_carry = len(self.cut.initial)
            env.update(zip(self.cut.received, message[:num_carry], strict=True))
            results = self.cut.eqn.outvars[num_carry:]
            names = [results[n] for n in self.cut.collected]
            env.update(zip(names, message[num_carry:], strict=True))
            interpreter = self._interpreter()
            interpreter.equations(self.head_eqns, env)
            found = [interpreter.value(atom, env) for atom in self.cut.losses]
            value = self.cut.traced.read_outputs(found)
            return Losses(value.objective, value.metrics)

        def blocks(
            rows: list[list[Any]],
            fixed: list[list[Any]],
            outer: list[Any],
            message: Message,
            changing: list[list[Any]],
            inputs: Any,
            virtual: Any,
        ) -> tuple[Message, list[list[Any]]]:
            env = self._environment(frozen, self.blocks_read, outer, inputs)
            interpreter = self._interpreter()
            interpreter.equations(self.extra_eqns, env)
            body = interpreter.scan_body(self.cut.eqn, interpreter.constants(self.cut.eqn, env))
            computed = [interpreter.value(self.cut.layered[n], env) for n in self.computed_rows]
            return self._run_blocks(body, message, rows, fixed, changing, computed, virtual)

        return StageFunctions(
            embed, blocks, head, self.embed_reads, self.blocks_read, self.head_reads
        )

    def _run_blocks(
        self,
        body: Any,
        message: Message,
        rows: list[list[Any]],
        fixed: list[list[Any]],
        changing: list[list[Any]],
        computed: list[Any],
        virtual: Any,
    ) -> tuple[Message, list[list[Any]]]:
        num_carry = len(self.cut.initial)
        carry: list[Any] = message[:num_carry]
        collected: list[Any] = message[num_carry:]
        after: list[list[Any]] = []
        first, count = self._first_and_count(virtual)
        for block in range(self.division.most):
            number = first + block
            own: dict[int, Any] = dict(zip(self.weight_rows, rows[block], strict=True))
            own |= dict(zip(self.fixed_rows, fixed[block], strict=True))
            own |= dict(zip(self.changing_rows, changing[block], strict=True))
            for row, values in zip(self.computed_rows, computed, strict=True):
                own[row] = lax.dynamic_index_in_dim(values, number, 0, keepdims=False)
            before = [*carry, *collected]
            carry, results = body(carry, [own[n] for n in range(len(self.cut.layered))])
            wanted = [results[n] for n in self.cut.collected]
            collected = [
                lax.dynamic_update_index_in_dim(buffer, result, number, 0)
                for buffer, result in zip(collected, wanted, strict=True)
            ]
            if not self.division.even:
                # What only fills a stage up runs, since all wait for the longest, and is dropped.
                kept = _choose(block < count, [*carry, *collected], before)
                carry, collected = kept[:num_carry], kept[num_carry:]
            after.append(
                [results[self.cut.changing[self.cut.stack_of[n]]] for n in self.changing_rows]
            )
        return [*carry, *collected], after

    def _first_and_count(self, virtual: Any) -> tuple[Any, Any]:
        """Return the number of a virtual stage's first block, and how many it has."""
        division = self.division
        if division.even:
            return virtual * division.most, division.most
        return jnp.asarray(division.starts)[virtual], jnp.asarray(division.counts)[virtual]

    def _no_results(self, carry: Sequence[Any]) -> Message:
        """Return empty arrays for the per-block results that are read after the blocks."""
        _, num_carry = scan_counts(self.cut.eqn)
        variables = [self.cut.eqn.outvars[num_carry + n] for n in self.cut.collected]
        wide = any(a.dtype == jnp.float64 for a in carry)
        shapes = [aval_of(variable) for variable in variables]
        return [
            jnp.zeros(a.shape, jnp.float64 if wide and is_narrow(a) else a.dtype) for a in shapes
        ]

    def _environment(
        self, frozen: Mapping[int, Any], numbers: Sequence[int], outer: list[Any], inputs: Any
    ) -> Environment:
        closed = self.cut.traced.closed
        batch, state = inputs
        env: Environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update((self.leaf_vars[n], value) for n, value in frozen.items())
        env.update(
            (self.leaf_vars[n], value)
            for n, value in zip(self.cut.changed_outer, state, strict=True)
        )
        env.update(
            (self.leaf_vars[self.outer_params[i]], value)
            for i, value in zip(numbers, outer, strict=True)
        )
        env.update(zip(self.batch_vars, batch, strict=True))
        return env

    def _interpreter(self) -> _OnStage:
        kind = _WideOnStage if self.where.wide else _OnStage
        return kind(self.where, self.uses)


def _choose(condition: Any, new: list[Any], old: list[Any]) -> list[Any]:
    return [jnp.where(condition, a, b) for a, b in zip(new, old, strict=True)]


class _OnStage(OnMesh):
    """Evaluates parts of a program on the devices of one stage."""

    def __init__(self, where: StageContext, uses: Mapping[Var, WeightUse]) -> None:
        super().__init__(where.mesh, where.pins, where.weights, uses, where.remat)
        self._draws = where.draws

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate an equation; lookups in dims that are divided are done piece by piece."""
        name = eqn.primitive.name
        drawn = None if self._draws is None else self._draws.draw(eqn, args)
        if drawn is not None:
            return drawn
        if math.prod(self._free.values()) == 1:
            return super().leaf(eqn, args)
        if name in SCATTERS:
            return in_whole_dims(eqn, args, self._mesh)
        if dims := moving_dims(eqn):
            found = super().leaf(eqn, all_whole(args, self._mesh, dims))
            # Results, too: their gradients move the other way.
            return all_whole(found, self._mesh, dims)
        if name != "gather":
            return super().leaf(eqn, args)
        atom = eqn.invars[0]
        use = None if isinstance(atom, Literal) else self._uses.get(atom)
        if use is not None and divides_rows(eqn, use.whole):
            rows = divided_rows(eqn, args[0], args[1], self._mesh, use.whole)
            return [self._rounded(rows, aval_of(eqn.outvars[0]).dtype)]
        if use is not None:
            return super().leaf(eqn, args)
        if picks_one(eqn):
            return [picked(eqn, args[0], args[1])]
        return in_whole_dims(eqn, args, self._mesh)

    def stack(self, use: WeightUse | None, value: Any) -> Any:
        """Return a stack of rows as blocks read them."""
        if use is None or self._remat.gather_inside:
            return value
        return self._make_ready(value, use.dtype, use.specs)

    def constants(self, eqn: Equation, env: Environment) -> list[Any]:
        """Return what every turn of a scan reads."""
        num_consts, _ = scan_counts(eqn)
        held = self._held(eqn)
        return [
            self._operand(atom, env, as_weight=number in held)
            for number, atom in enumerate(eqn.invars[:num_consts])
        ]

    def value(self, atom: Any, env: Environment) -> Any:
        """Return what an atom stands for, weights ready for use."""
        return jnp.asarray(self._operand(atom, env, as_weight=False))


class _WideOnStage(_OnStage, WideOnMesh):
    """The same in float64."""
