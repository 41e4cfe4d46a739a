"""The stages of a traced loss: embedding, blocks and head as functions, evaluated on the mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.pipeline.contract import Losses, Message, StageFunctions
from meshwright.pipeline.cut import BlockCut
from meshwright.pipeline.division import Division
from meshwright.pipeline.stage_rules import WithinStage
from meshwright.program.evaluate import Environment, Evaluator
from meshwright.program.forward import mesh_evaluator, weight_uses
from meshwright.program.gather import GatherSpecs
from meshwright.program.jaxprs import Value, Var, aval_of, scan_counts
from meshwright.program.local import LocalDraws
from meshwright.program.mesh_rules import LayerScans, shared_weights
from meshwright.program.mesh_view import MeshView
from meshwright.program.remat import Remat
from meshwright.program.widen import is_narrow


@dataclass(frozen=True)
class Surroundings:
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
    def view(self) -> MeshView:
        """The mesh as a stage sees it."""
        return MeshView(self.mesh, frozenset({"pipe", *self.batch_axes}))

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.view.platform

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

    def __init__(self, cut: BlockCut, where: Surroundings, division: Division) -> None:
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
        if self.where.remat.gather_inside:
            return [stacks[self.cut.stack_of[row]] for row in rows]
        return [
            self._evaluator.weights.make_ready(value, use) if use is not None else value
            for use, value in (
                (self.uses.get(self.cut.layered[row]), stacks[self.cut.stack_of[row]])
                for row in rows
            )
        ]

    def functions(self, frozen: Mapping[int, Any]) -> StageFunctions:
        """Return the stages; ``frozen`` holds step leaves outside of blocks that are not trained.

        Inputs of a microbatch are (batch leaves, values of `BlockCut.changed_outer`).
        """

        def embed(outer: list[Any], inputs: Any) -> Message:
            env = self._environment(frozen, self.embed_reads, outer, inputs)
            self._evaluator.equations(self.embed_eqns, env)
            carry = [jnp.asarray(env.read(atom)) for atom in self.cut.initial]
            return [*carry, *self._no_results(carry)]

        def head(outer: list[Any], message: Message, inputs: Any) -> Losses:
            env = self._environment(frozen, self.head_reads, outer, inputs)
            num_carry = len(self.cut.initial)
            env.values.update(zip(self.cut.received, message[:num_carry], strict=True))
            results = self.cut.eqn.outvars[num_carry:]
            names = [results[n] for n in self.cut.collected]
            env.values.update(zip(names, message[num_carry:], strict=True))
            self._evaluator.equations(self.head_eqns, env)
            losses = [jnp.asarray(env.read(atom)) for atom in self.cut.losses]
            value = self.cut.traced.read_outputs(losses)
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
            self._evaluator.equations(self.extra_eqns, env)
            body = LayerScans(self.where.remat).body(self.cut.eqn, self._constants(env), env)
            computed = [jnp.asarray(env.read(self.cut.layered[n])) for n in self.computed_rows]
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
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update((self.leaf_vars[n], value) for n, value in frozen.items())
        values.update(
            (self.leaf_vars[n], value)
            for n, value in zip(self.cut.changed_outer, state, strict=True)
        )
        values.update(
            (self.leaf_vars[self.outer_params[i]], value)
            for i, value in zip(numbers, outer, strict=True)
        )
        values.update(zip(self.batch_vars, batch, strict=True))
        return Environment(self._evaluator, values)

    def _constants(self, env: Environment) -> list[Value]:
        """Return what every block reads, half-precision weights unrounded."""
        unrounded = shared_weights(self.cut.eqn, env)
        return [
            env.unrounded(atom) if number in unrounded else env.read(atom)
            for number, atom in enumerate(self.cut.constants)
        ]

    @cached_property
    def _evaluator(self) -> Evaluator:
        where, mesh = self.where, self.where.view
        draws = [] if where.draws is None else [where.draws.draw]
        return mesh_evaluator(
            mesh,
            self.uses,
            where.remat,
            wide=where.wide,
            pins=where.pins,
            without_data=where.weights,
            first=[*draws, WithinStage(mesh)],
        )


def _choose(condition: Any, new: list[Any], old: list[Any]) -> list[Any]:
    return [jnp.where(condition, a, b) for a, b in zip(new, old, strict=True)]
