"""The training state of a model on one device, for any plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from meshwright.config.schema import Precision, ShardingConfig
from meshwright.ledgers.placed_program import (
    PlacedEvent,
    PlacedWeight,
    place_events,
    place_weights,
    read_weights,
)
from meshwright.mesh.axes import CONTEXT, PIPE
from meshwright.pipeline.place import place_on_stages
from meshwright.plan import Plan
from meshwright.planner.estimate.traced_programs import Blocks, TracedPrograms, blocks_of
from meshwright.planner.workload.sizes import LeafShares
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.kernels.find_kernels import KernelSearch
from meshwright.program.trace.layout import Layout
from meshwright.sharding.decide import decide, place_leaves
from meshwright.sharding.placement import Placement
from meshwright.sharding.tensor import TensorChoice, choose_tensor_dims
from meshwright.step.optimizer import FlatOptimizer


class ModelStates:
    """Where the leaves of a model are placed, and what a device holds of them."""

    def __init__(self, programs: TracedPrograms, optimizer: optax.GradientTransformation) -> None:
        self._programs, self._optimizer = programs, optimizer
        classes = programs.classes
        self._tensor = functools.cache(lambda p, b, n: choose_tensor_dims(classes(p, b), n))
        self._reads = functools.cache(lambda *program: read_weights(programs.traced(*program)))
        self._events = functools.cache(self._find_events)
        self.attention = functools.cache(self._find_attention)
        self._known: dict[Any, PlacedState] = {}
        self._alike: list[tuple[Any, bool]] = []
        self._flat: dict[Any, FlatOptimizer] = {}

    def of(self, plan: Plan) -> PlacedState:
        """Return what one device holds with a plan."""
        key = state_key(plan)
        if key not in self._known:
            self._known[key] = self._place(plan)
        return self._known[key]

    def tensor_choice(self, plan: Plan) -> TensorChoice:
        """Return what the tensor axis of a plan shards, in the program without stages."""
        return self._tensor(plan.precision, blocks_of(plan), plan.size("tensor"))

    def events(self, plan: Plan) -> list[PlacedEvent]:
        """Return what operations of a plan send over its tensor axis."""
        return self._events(plan.precision, _blocks_or_stages(plan), plan.size("tensor"))

    def exchanges(self, plan: Plan, platform: str) -> list[AttentionLayouts]:
        """Return what attention sends over the context axis of a plan."""
        if plan.size(CONTEXT) == 1:
            return []
        sizes = ("tensor", plan.size("tensor")), (CONTEXT, plan.size(CONTEXT))
        search = KernelSearch(plan.kernels, platform, planned=True)
        return self.attention(plan.precision, self._programs.traced_blocks(plan), sizes, search)

    def _find_attention(
        self, precision: Precision, blocks: Blocks, sizes: Any, search: KernelSearch | None = None
    ) -> list[AttentionLayouts]:
        traced = self._programs.traced(precision, blocks)
        known, whole = self._programs.classes(precision, blocks), ShardingConfig()
        decision = decide(traced, dict(sizes), whole, search=search, classes=known)
        return list(decision.exchanges.attention.values())

    def _find_events(
        self, precision: Precision, blocks: Blocks | None, size: int
    ) -> list[PlacedEvent]:
        """Return the events of a program whose blocks run this way; None for one in stages."""
        cut = self._programs.cut(precision) if blocks is None else None
        classes = self._programs.classes(precision, blocks)
        return place_events(classes, self._tensor(precision, blocks, size), cut)

    def _place(self, plan: Plan) -> PlacedState:
        sizes = _model_sizes(plan)
        program = self._programs.step_program(plan)
        layout = program.traced.layout
        cut, blocks, staged = program.cut, _blocks_or_stages(plan), set[int]()
        if cut is not None:
            staged = {stack.number for stack in cut.stacks}
        classes = self._programs.classes(plan.precision, blocks)
        tensor = self._tensor(plan.precision, blocks, plan.size("tensor"))
        placements = place_leaves(program.traced, classes, tensor, sizes, plan.sharding, staged)
        if cut is not None:
            placements = place_on_stages(cut, placements, plan.size("pipe"), plan.num_chunks)
        reads = self._reads(plan.precision, blocks)
        placed = place_weights(layout.step_leaves, placements, plan, reads, cut)
        weights = Counter(weight._replace(module="") for weight in placed)
        return self._on_device(layout, placements, plan, weights, staged)

    def _on_device(
        self,
        layout: Layout,
        placements: Sequence[Placement],
        plan: Plan,
        weights: Mapping[PlacedWeight, int],
        staged: Collection[int],
    ) -> PlacedState:
        """Return the training state on one device; ``staged`` leaves hold blocks of stages."""
        sizes, zero = _model_sizes(plan), plan.sharding.zero
        optimizer = self._flat_optimizer(layout, placements, sizes)
        leaves = layout.step_leaves
        trained = layout.numbers("param")
        shares: dict[int, LeafShares] = {}
        parameters = gradients = sums = 0
        outside = generating = 0.0
        trained_bytes, widest = 0, 8 if plan.precision == "no" else 2
        for number, (step, placement) in enumerate(zip(leaves, placements, strict=True)):
            whole = 1 / placement.gathered("fsdp").shards(sizes)
            in_use = placement.gathered("fsdp", PIPE).shards(sizes)
            least = 1 / placement.shards(sizes)
            # Below zero 3, parameters outside of stages are whole on all of them.
            kept = ("fsdp",) if number in staged else ("fsdp", PIPE)
            at_rest = least if zero == 3 else 1 / placement.gathered(*kept).shards(sizes)
            gradient = whole if zero == 1 else least
            shares[number] = LeafShares(whole, at_rest, gradient)
            parameters += round(step.leaf.nbytes * at_rest)
            size = step.leaf.size * min(widest, step.leaf.dtype.itemsize)
            generating += size / in_use
            if step.leaf.role == "param":
                trained_bytes += round(step.leaf.nbytes * at_rest)
                if staged and number not in staged:
                    outside += step.leaf.nbytes / in_use
                gradients += round(step.leaf.nbytes * gradient)
                sums += round(4 * step.leaf.nbytes / step.leaf.dtype.itemsize * gradient)
        placed = optimizer.placed([placements[n] for n in trained], sizes)
        return PlacedState(
            parameters=parameters,
            optimizer=sum(leaf.nbytes // leaf.placement.shards(sizes) for leaf in placed),
            gradients=gradients,
            sums=sums,
            shares=shares,
            weights=weights,
            outside=outside,
            trained=trained_bytes,
            generating=generating,
        )

    def _flat_optimizer(
        self, layout: Layout, placements: Sequence[Placement], sizes: Mapping[str, int]
    ) -> FlatOptimizer:
        """Return the optimizer for a layout, which is traced once for all meshes.

        Layouts that differ in the order of blocks alone have the same state.
        """
        own = layout.numbers("param")
        params = [layout.step_leaves[n] for n in own]
        key = tuple((s.leaf.path, s.leaf.shape, s.leaf.dtype, tuple(sorted(s.sources)))
                    for s in params)  # fmt: skip
        if key not in self._flat:
            # Whether stacks are treated like their blocks does not depend on their padding.
            stacks = sorted((s.leaf.path, sorted(s.sources)) for s in params if s.stacked)
            alike = next((known for paths, known in self._alike if paths == stacks), None)
            placed = [placements[n] for n in own]
            flat = FlatOptimizer(
                self._optimizer, layout, placed, sizes, stacks_alike=alike, compared="ends"
            )
            if stacks and alike is None:
                self._alike.append((stacks, flat.stacks_alike))
            self._flat[key] = flat
        return self._flat[key]


def _model_sizes(plan: Plan) -> dict[str, int]:
    """Return the sizes of the axes that shard the model."""
    return {axis: size for axis, size in plan.mesh.items() if axis != "data"}


def _blocks_or_stages(plan: Plan) -> Blocks | None:
    """Return how the blocks of a plan run; None if pipeline stages run them."""
    return None if plan.size("pipe") > 1 else plan.sharding.blocks


def state_key(plan: Plan) -> tuple[Any, ...]:
    """Return what the training state on a device depends on."""
    sizes = tuple(_model_sizes(plan).items())
    # Recomputation changes activations, but no state.
    sharding = str([(name, value) for name, value in plan.sharding if name != "remat"])
    return sizes, sharding, plan.precision, plan.num_chunks


@dataclass(frozen=True)
class PlacedState:
    """The training state on one device.

    All but ``shares``, by number of the step leaf, and ``weights``, how many are placed alike, are
    bytes. Parameters include the model's other state, gradients are reduced, sums are those over
    microbatches. ``outside`` are parameters outside of pipeline stages as each stage computes with
    them: sharded over the tensor axis alone. So are ``generating``, all parameters in the compute
    format; ``trained`` are the parameters that are.
    """

    parameters: int
    optimizer: int
    gradients: int
    sums: int
    shares: Mapping[int, LeafShares]
    weights: Mapping[PlacedWeight, int]
    outside: float = 0.0
    trained: int = 0
    generating: float = 0.0
