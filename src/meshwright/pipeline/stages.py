"""The stages of a traced loss: embedding, blocks and head as functions, evaluated on the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.pipeline.aliases import Array, BlockRow, LeafValues, Message
from meshwright.pipeline.block_cut import BlockCut, LeafKind, Region
from meshwright.pipeline.context import StageContext
from meshwright.pipeline.contract import (
    BlockInputs,
    BlockOutputs,
    Losses,
    Microbatch,
    StageFunctions,
)
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
from meshwright.program.interpret import Environment, ScanBody
from meshwright.program.jaxprs import Equation, Literal, Var, aval_of, scan_counts
from meshwright.program.widen import is_narrow


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

    def prepare(self, stacks: Mapping[int, Array], kind: LeafKind) -> BlockRow:
        """Return the stacks of a kind as blocks read them, for the values of the step leaves.

        Weights are cast and gathered here, unless each block does so for itself.
        """
        interpreter = self._interpreter()
        return {
            layered.position: interpreter.stack(
                self.uses.get(layered.atom), stacks[layered.stack.number]
            )
            for layered in self.cut.inputs_of(kind)
        }

    def functions(self, outer: Mapping[int, Array]) -> StageFunctions:
        """Return the stages for the values of the step leaves outside of the blocks."""
        frozen = {leaf.variable: outer[leaf.number] for leaf in self.cut.outer_of("fixed")}
        cut = self.cut

        def embed(outer: LeafValues, microbatch: Microbatch) -> Message:
            env = self._environment(frozen, outer, microbatch)
            interpreter = self._interpreter()
            interpreter.equations(cut.embedding.eqns, env)
            carry = [interpreter.value(atom, env) for atom in cut.embedding.outputs]
            return [*carry, *self._no_results(carry)]

        def head(outer: LeafValues, message: Message, microbatch: Microbatch) -> Losses:
            env = self._environment(frozen, outer, microbatch)
            num_carry = len(cut.scan.final)
            env.update(zip(cut.scan.final, message[:num_carry], strict=True))
            results = [result.variable for result in cut.collected]
            env.update(zip(results, message[num_carry:], strict=True))
            interpreter = self._interpreter()
            interpreter.equations(cut.head.eqns, env)
            value = cut.traced.read_outputs(
                [interpreter.value(atom, env) for atom in cut.head.outputs]
            )
            return Losses(value.objective, value.metrics)

        def blocks(inputs: BlockInputs) -> BlockOutputs:
            env = self._environment(frozen, inputs.outer, inputs.microbatch)
            interpreter = self._interpreter()
            interpreter.equations(cut.shared.eqns, env)
            body = interpreter.scan_body(cut.scan.eqn, interpreter.constants(cut.scan.eqn, env))
            computed = {row.position: interpreter.value(row.atom, env) for row in cut.computed}
            return self._run_blocks(body, inputs, computed)

        return StageFunctions(
            embed,
            blocks,
            head,
            embed_reads=_weights_of(cut.embedding),
            blocks_read=_weights_of(cut.shared),
            head_reads=_weights_of(cut.head),
        )

    def _run_blocks(self, body: ScanBody, inputs: BlockInputs, computed: BlockRow) -> BlockOutputs:
        num_carry = len(self.cut.scan.initial)
        carry, collected = inputs.message[:num_carry], inputs.message[num_carry:]
        changed: list[BlockRow] = []
        first, count = self._first_and_count(inputs.virtual_stage)
        for block in range(self.division.most):
            number = first + block
            row = inputs.weights[block] | inputs.fixed[block] | inputs.changing[block]
            for position, values in computed.items():
                row[position] = lax.dynamic_index_in_dim(values, number, 0, keepdims=False)
            before = [*carry, *collected]
            carry, results = body(carry, [row[layered.position] for layered in self.cut.layered])
            wanted = [results[result.position] for result in self.cut.collected]
            collected = [
                lax.dynamic_update_index_in_dim(buffer, result, number, 0)
                for buffer, result in zip(collected, wanted, strict=True)
            ]
            if not self.division.even:
                # All stages wait for the longest, so padding blocks run and are dropped.
                kept = _choose(block < count, [*carry, *collected], before)
                carry, collected = kept[:num_carry], kept[num_carry:]
            changed.append(self._changed_rows(results))
        return BlockOutputs([*carry, *collected], changed)

    def _changed_rows(self, results: Sequence[Array]) -> BlockRow:
        """Return the state a block leaves, from the results of its program."""
        return {
            layered.position: results[layered.stack.result]
            for layered in self.cut.inputs_of("changing")
            if layered.stack.result is not None
        }

    def _first_and_count(self, virtual_stage: Array) -> tuple[Array, Array | int]:
        """Return the number of a virtual stage's first block, and how many it has."""
        division = self.division
        if division.even:
            return virtual_stage * division.most, division.most
        starts, counts = jnp.asarray(division.starts), jnp.asarray(division.counts)
        return starts[virtual_stage], counts[virtual_stage]

    def _no_results(self, carry: Sequence[Array]) -> Message:
        """Return empty arrays for the per-block results that are read after the blocks."""
        wide = any(a.dtype == jnp.float64 for a in carry)
        shapes = [aval_of(result.variable) for result in self.cut.collected]
        return [
            jnp.zeros(a.shape, jnp.float64 if wide and is_narrow(a) else a.dtype) for a in shapes
        ]

    def _environment(
        self, frozen: Mapping[Var, Array], outer: LeafValues, microbatch: Microbatch
    ) -> Environment:
        closed, variables = self.cut.traced.closed, self.cut.jaxpr.invars
        env: Environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(frozen)
        env.update((variables[n], value) for n, value in (microbatch.state | outer).items())
        env.update(zip(self.cut.batch_variables, microbatch.batch, strict=True))
        return env

    def _interpreter(self) -> _OnStage:
        kind = _WideOnStage if self.where.wide else _OnStage
        return kind(self.where, self.uses)


def _weights_of(region: Region) -> tuple[int, ...]:
    return tuple(leaf.number for leaf in region.weights)


def _choose(condition: Array | bool, new: list[Array], old: list[Array]) -> list[Array]:
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
