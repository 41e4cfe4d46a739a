"""Scans over stacked layers: weights gathered layer by layer, blocks under a remat policy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from meshwright.program.blocks.block_lists import BlockSegment, cut_iteration
from meshwright.program.evaluate.evaluator import (
    Environment,
    Evaluator,
    ScanBody,
    run_scan,
    scan_body,
)
from meshwright.program.evaluate.weight_uses import Weights, WeightUse
from meshwright.program.jaxpr.equations import (
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    scan_counts,
    scan_parts,
)
from meshwright.program.on_mesh.remat import Remat
from meshwright.program.on_mesh.run_blocks import BlockRunner


@dataclass(frozen=True)
class LayerScans:
    """Gathers the weights of a scan over stacked layers layer by layer, under a remat policy.

    If ``by_block``, an iteration of several blocks recomputes them one by one.
    """

    remat: Remat
    by_block: bool = False

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a scan over stacks of weights, or one that reads half-precision weights."""
        stacks, shared = stacked_weights(eqn, env), shared_weights(eqn, env)
        if not stacks and not shared:
            return None
        per_block = env.evaluator.weights.gather_per_block
        operands = [
            # A stack to scan over stays sharded, or is gathered as a whole.
            env.values[stacks[number].leaf]
            if number in stacks and per_block
            else env.in_param_dtype(atom)
            if number in stacks or number in shared
            else env.read(atom)
            for number, atom in enumerate(eqn.invars)
        ]
        consts, _, _ = scan_parts(eqn, operands)
        return run_scan(eqn, operands, self.body(eqn, consts, env))

    def body(self, eqn: Equation, consts: list[Value], env: Environment) -> ScanBody:
        """Return a scan's body; ``consts`` has half-precision weights in the parameter's dtype."""
        stacks, shared = stacked_weights(eqn, env), shared_weights(eqn, env)
        if not stacks and not shared:
            return scan_body(eqn, consts, env)
        _, num_carry = scan_counts(eqn)
        closed: ClosedJaxpr = eqn.params["jaxpr"]
        invars, remat = closed.jaxpr.invars, self.remat if stacks else Remat()
        segments = cut_iteration(closed.jaxpr, by_block=self.by_block and remat.recomputes)
        several = len(segments) > 1
        sharded = any(use.specs is not None for use in stacks.values())
        layers = _Layers(
            remat,
            # Without barriers, several blocks may be recomputed at the same time.
            prevent_cse=several,
            constants=dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
            stacks={invars[number]: use for number, use in stacks.items()},
            shared={invars[number] for number in shared},
            ahead=remat.gather_per_block and sharded and several,
        )

        def body(carry: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
            inner = env.evaluator.environment(closed, [*consts, *carry, *xs])
            layers.run(segments, inner)
            out = [inner.value(atom) for atom in closed.jaxpr.outvars]
            return out[:num_carry], out[num_carry:]

        return body


@dataclass(frozen=True)
class _Layers(BlockRunner):
    """Runs the blocks of one iteration of a scan.

    Attributes:
        stacks: the inputs that are layers of stacked weights.
        shared: the inputs that are half-precision weights of all layers, given in the parameter's
            dtype.
        ahead: whether weights are gathered one block ahead.
    """

    constants: Mapping[Var, Value] = field(default_factory=dict[Var, Value])
    stacks: Mapping[Var, WeightUse] = field(default_factory=dict[Var, WeightUse])
    shared: Collection[Var] = ()
    ahead: bool = False

    def arguments(self, block: BlockSegment, env: Environment) -> dict[Var, Value]:
        """Return what a block reads, weights first; constants are not passed."""
        reads = [v for v in block.reads if v not in self.constants]
        weights = {v: env.values[v] for v in reads if v in self.stacks}
        return weights | {v: env.value(v) for v in reads if v not in self.stacks}

    def gathered(self, block: BlockSegment, weights: Weights) -> Collection[Var]:
        """Return the layers of stacked weights, if weights are gathered one block ahead."""
        return self.stacks if self.ahead else ()

    def inside(self, arguments: Mapping[Var, Value], evaluator: Evaluator) -> Environment:
        """Return the environment of a block, in which its weights are prepared for use."""
        values, prepare = {**self.constants, **arguments}, evaluator.weights.prepare_layer
        layers = [v for v in arguments if v in self.stacks]
        prepared = {v: prepare(values[v], self.stacks[v]) for v in layers}
        for v in arguments:
            if v in self.shared:
                prepared[v] = values[v]
                values[v] = values[v].astype(aval_of(v).dtype)
        return Environment(evaluator, values, prepared)


def stacked_weights(eqn: Equation, env: Environment) -> dict[int, WeightUse]:
    """Return which operands of a scan are stacks of weights that it slices."""
    if eqn.primitive.name != "scan":
        return {}
    first, uses = sum(scan_counts(eqn)), env.evaluator.weights.uses
    return {
        number: uses[atom]
        for number, atom in enumerate(eqn.invars)
        if number >= first and not isinstance(atom, Literal) and atom in uses
    }


def shared_weights(eqn: Equation, env: Environment) -> set[int]:
    """Return which operands of a scan are half-precision weights that all iterations read."""
    if eqn.primitive.name != "scan":
        return set()
    num_consts, _ = scan_counts(eqn)
    return {n for n, atom in enumerate(eqn.invars[:num_consts]) if env.is_half_weight(atom)}
