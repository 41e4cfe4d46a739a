"""Estimates of plans for one model, from its traced program."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.errors import UserError
from meshwright.hardware import Chip, Hardware
from meshwright.mesh.build import build_mesh
from meshwright.pipeline.divide.cut import BlockCut, cut_blocks, ordered_by_stage
from meshwright.pipeline.place import place_on_stages
from meshwright.plan import Plan
from meshwright.planner.estimate import Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.gradient_program import (
    SAMPLES,
    GradientProgram,
    TracedGradients,
    Variant,
    schedule_gradients,
    trace_gradients,
)
from meshwright.planner.in_memory import Peak, Use, peak_of
from meshwright.planner.kernel_times import Work, seconds_of, works_of
from meshwright.planner.placed_state import PlacedState, place_state
from meshwright.planner.sizes import DeviceSizes
from meshwright.planner.stage_parts import SlotCounts, count_slots, nbytes_of
from meshwright.planner.traffic import (
    Sent,
    stage_traffic,
    tensor_traffic,
    time_traffic,
    weight_traffic,
)
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.dims import DimClasses
from meshwright.program.flops import count_flops
from meshwright.program.trace.build_model import ModelSource, describe_model
from meshwright.program.trace.layout import Layout, StepLeaf
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss
from meshwright.sharding.decide import dim_classes, place_leaves
from meshwright.sharding.placement import Placement
from meshwright.sharding.tensor import TensorChoice, check_tensor_size, choose_tensor_dims
from meshwright.step.optimizer import FlatOptimizer
from meshwright.step.step_program import StepProgram, step_program, unstaged_program
from meshwright.trees import Batch, resize_batch, tokens_per_sample

_TENSOR_SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)

_STAGE_OVERHEAD: Mapping[str, float] = {"gpipe": 1.4, "1f1b": 1.4, "interleaved": 1.5, "zb_h1": 1.7}
"""Time of a stage relative to its share of the work (benchmarks/results/gpu_pipeline.json)."""

PLATFORMS: Mapping[str, str] = {"cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}


class Estimator(Protocol):
    """Estimates plans for one model, loss and optimizer."""

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        ...

    @property
    def num_blocks(self) -> int:
        """The number of repeated blocks, which pipeline stages divide; 0 without such blocks."""
        ...

    @property
    def tensor_sizes(self) -> frozenset[int]:
        """The sizes of a tensor axis, up to 64, that divide what it would divide."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample; 1 for data other than tokens."""
        ...

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return what a plan needs. Milliseconds: a search asks for thousands."""
        ...


class ProgramEstimator:
    """Estimates plans from the traced program of a model.

    Programs are traced for two samples and one device, once for each way to save activations;
    what a plan needs follows from how its mesh divides their arrays. Nothing is allocated.

    Args:
        model: builds the model from `nnx.Rngs`.
        loss: ``loss(model, batch)``.
        optimizer: any optax transformation.
        batch: a batch of any size, as arrays or shapes.
        trainable: NNX filter of what is trained.
        guarded: whether updates that are not finite change nothing.
        precision: the compute format of most plans that will be asked for, in which the model is
            traced to describe it.
    """

    def __init__(
        self,
        model: ModelSource,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        *,
        trainable: Filter = nnx.Param,
        guarded: bool = True,
        precision: Precision = "no",
    ) -> None:
        self._guarded = guarded
        self._precision: Precision = precision
        self._loss, self._optimizer = loss, optimizer
        self._leaves = describe_model(model, trainable)
        self._samples = resize_batch(batch, SAMPLES)
        self._mesh = build_mesh({}, jax.devices()[:1])
        self._programs: dict[Any, StepProgram] = {}
        self._classes: dict[Any, DimClasses] = {}
        self._tensor: dict[Any, TensorChoice] = {}
        self._traced: dict[Any, TracedGradients] = {}
        self._gradients: dict[Any, GradientProgram] = {}
        self._states: dict[Any, PlacedState] = {}
        self._peaks: dict[Any, Peak] = {}
        self._counted: dict[Any, float] = {}
        self._cuts: dict[Precision, BlockCut] = {}
        self._alike: list[tuple[Any, bool]] = []
        self._flat_optimizers: dict[int, tuple[Layout, FlatOptimizer]] = {}
        self._seconds: dict[Any, tuple[float, float]] = {}

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(math.prod(leaf.shape) for leaf in self._leaves.leaves if leaf.is_weight)

    @property
    def num_blocks(self) -> int:
        """The number of repeated blocks, which pipeline stages divide; 0 without such blocks."""
        return self._num_blocks

    @cached_property
    def _num_blocks(self) -> int:
        try:
            return self._cut(self._precision).num_blocks
        except UserError:
            return 0

    @property
    def tensor_sizes(self) -> frozenset[int]:
        """The sizes of a tensor axis, up to 64, that divide what it would divide."""
        return self._tensor_sizes

    @cached_property
    def _tensor_sizes(self) -> frozenset[int]:
        classes = dim_classes(self._program(self._precision, "scan").traced)
        return frozenset(size for size in _TENSOR_SIZES if _divides(classes, size))

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample; 1 for data other than tokens."""
        return tokens_per_sample(self._samples) or 1

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return what a plan needs on some hardware."""
        return Estimate(plan, hardware, self._memory(plan, hardware), self._time(plan, hardware))

    def works(self, plan: Plan, hardware: Hardware) -> list[Work]:
        """Return what the kernels of one microbatch do on a device, all stages together."""
        program = self._gradient_program(plan, hardware)
        sizes = replace(self._sizes(plan, program, hardware), row_limit={}, _known={})
        return list(works_of(program.kernels, sizes))

    def _time(self, plan: Plan, hardware: Hardware) -> TimeEstimate:
        chip, stages = hardware.chip, plan.size("pipe")
        in_loops, outside = self._kernel_seconds(plan, hardware)
        state = self._state(plan)
        # The optimizer reads gradients twice, for their norm and the update; the rest once.
        moved = 2 * (state.parameters + state.optimizer) + 2 * state.gradients
        update = moved / (chip.hbm_tb_per_s_per_device * 1e12 * chip.hbm_share)
        steps = plan.batch.gradient_accumulation_steps
        # Blocks are divided over stages; the last stage also computes the loss.
        compute = steps * (in_loops / stages + outside)
        bubble = 0.0
        if stages > 1:
            compute *= _STAGE_OVERHEAD.get(plan.schedule or "", 1.4)
            waits = self._slots(plan).bubble
            bubble = compute * waits / (1 - waits)
        peak = chip.tflops_per_device * 1e12 * _peak_share(chip, plan.precision)
        return TimeEstimate(
            compute=compute + update,
            traffic=time_traffic(self._sent(plan, hardware), plan, hardware, compute),
            bubble=bubble,
            flops=self._flops(plan),
            peak_flops=peak * hardware.count,
        )

    def _kernel_seconds(self, plan: Plan, hardware: Hardware) -> tuple[float, float]:
        """Return the seconds of one microbatch's kernels: in loops, and outside of them."""
        chip, tensor = hardware.chip, plan.size("tensor")
        variant = self._variant(plan, hardware)
        key = (variant, plan.precision, _blocks(plan), tensor, plan.batch.micro_batch_size, chip)
        if key not in self._seconds:
            rate = chip.tflops_per_device * 1e12 * _product_share(chip, plan.precision)
            seconds = {True: 0.0, False: 0.0}
            for work in self.works(plan, hardware):
                seconds[work.in_loop] += work.times * seconds_of(work, chip, rate)
            self._seconds[key] = seconds[True], seconds[False]
        return self._seconds[key]

    def _flops(self, plan: Plan) -> float:
        key = plan.precision
        if key not in self._counted:
            traced = self._program(plan.precision, "unroll").traced
            self._counted[key] = count_flops(traced) / SAMPLES
        return self._counted[key] * plan.batch.global_batch_size

    def _sent(self, plan: Plan, hardware: Hardware) -> Iterator[Sent]:
        program, state = self._gradient_program(plan, hardware), self._state(plan)
        leaves = self._staged(plan).traced.layout.step_leaves
        twice = [n for n, step in enumerate(leaves) if _in_blocks(step)]
        yield from weight_traffic(leaves, state, plan, twice)
        tensor = self._tensor_choice(plan)
        rows = plan.batch.micro_batch_size / SAMPLES
        if tensor.size > 1:
            yield from tensor_traffic(self._dim_classes(plan).events_of(tensor.ways), plan, rows)
        blocks = program.blocks
        if plan.size("pipe") > 1 and blocks is not None:
            carried = nbytes_of(blocks.carried, self._sizes(plan, program, hardware))
            yield from stage_traffic(carried, plan)

    def _memory(self, plan: Plan, hardware: Hardware) -> MemoryEstimate:
        state, peak = self._state(plan), self._peak(plan, hardware)
        steps = plan.batch.gradient_accumulation_steps
        sample = sum(leaf.size * leaf.dtype.itemsize for leaf in self._batch_leaves()) / SAMPLES
        sums = state.sums + state.gradients if steps > 1 else 0
        if plan.size("pipe") > 1:
            sums = state.sums
        # Before the optimizer runs there are all gradients, and nothing else.
        last = max(state.gradients, sums)
        if self._guarded and hardware.chip.platform == "cpu":
            # The CPU's compiler keeps old and new values until it is known which ones stay.
            last = max(last, state.parameters + state.optimizer)
        missing = max(0.0, last - peak.nbytes - sums)
        return MemoryEstimate(
            parameters=state.parameters,
            optimizer=state.optimizer,
            gradients=round(peak.uses["gradients"] + sums + missing),
            batch=round(sample * plan.batch.micro_batch_size * steps),
            gathered=round(peak.uses["gathered"]),
            activations=round(peak.uses["activations"]),
            working=round(peak.uses["working"]),
            all_gradients=max(state.gradients, sums),
        )

    def _slots(self, plan: Plan) -> SlotCounts:
        return count_slots(
            plan.schedule or "1f1b", plan.num_chunks, plan.num_microbatches, plan.size("pipe")
        )

    def _stage_peak(self, plan: Plan, program: GradientProgram, sizes: DeviceSizes) -> Peak:
        """Return the peak of a pipeline stage."""
        stages, blocks = plan.size("pipe"), program.blocks
        whole = peak_of(program.timeline, sizes)
        if blocks is None:
            return whole
        slots = self._slots(plan)
        each = nbytes_of(blocks.saved, sizes) * math.ceil(blocks.forward.times / stages)
        carried = nbytes_of(blocks.carried, sizes) * slots.carried
        state = self._state(plan)
        half = COMPUTE_DTYPES[plan.precision] is not None
        casts = state.parameters / 2 if half and plan.size("fsdp") == 1 else 0.0
        uses: dict[Use, float] = {
            "gradients": 0.0,
            "gathered": whole.uses["gathered"] + casts,
            "activations": each / plan.num_chunks * (slots.saved + slots.cuts / 2) + carried,
            "working": whole.uses["working"],
        }
        return Peak(sum(uses.values()), uses, whole.largest)

    def _batch_leaves(self) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self._samples)
        ]

    def _peak(self, plan: Plan, hardware: Hardware) -> Peak:
        staged = (plan.schedule, plan.num_microbatches, plan.num_chunks, plan.size("pipe"))
        key = (self._state_key(plan), plan.precision, plan.batch.micro_batch_size,
               hardware.chip.platform, plan.kernels, staged)  # fmt: skip
        if key not in self._peaks:
            program = self._gradient_program(plan, hardware)
            sizes = self._sizes(plan, program, hardware)
            self._peaks[key] = (
                self._stage_peak(plan, program, sizes)
                if plan.size("pipe") > 1
                else _with_part_sums(peak_of(program.timeline, sizes), program, sizes)
            )
        return self._peaks[key]

    def _sizes(self, plan: Plan, program: GradientProgram, hardware: Hardware) -> DeviceSizes:
        rows = plan.batch.micro_batch_size / SAMPLES
        # The leaves are those of the program that was traced.
        sharding = plan.sharding.model_copy(update={"blocks": self._traced_blocks(plan)})
        plan = plan.model_copy(update={"sharding": sharding})
        tensor = self._tensor_choice(plan)
        parts: dict[int, int] = {}
        for leaf in program.classes.leaves:
            choice = tensor.leaves.get(leaf.path)
            if choice is not None and choice.dim is not None:
                parts |= {atom.id: tensor.size for atom in leaf.dims[choice.dim][:1]}
        limits = {c: most / (program.token_rows * SAMPLES) for c, most in program.row_limit.items()}
        return DeviceSizes(
            rows,
            program.classes.batch,
            parts,
            self._state(plan).shares,
            transposes=hardware.chip.platform == "cpu",
            row_limit=limits,
        )

    def _variant(self, plan: Plan, hardware: Hardware) -> Variant:
        sharding = plan.sharding
        gathers = plan.size("fsdp") > 1 and sharding.zero == 3 and not sharding.keep_gathered
        return Variant(
            sharding.remat,
            # Whatever else is computed again is the same with and without gathers.
            gathers=gathers and sharding.remat == "none",
            rows=plan.size("tensor") == 1,
            kernels=plan.kernels,
            platform=PLATFORMS[hardware.chip.platform],
        )

    def _gradient_program(self, plan: Plan, hardware: Hardware) -> GradientProgram:
        variant, blocks = self._variant(plan, hardware), _blocks(plan)
        key = (variant, plan.precision, blocks)
        if key not in self._gradients:
            as_loop = self._traced_blocks(plan)
            traced = self._traced_gradients(plan.precision, as_loop, variant)
            self._gradients[key] = schedule_gradients(
                traced, variant.platform, unrolled=blocks != as_loop
            )
        return self._gradients[key]

    def _traced_gradients(
        self, precision: Precision, blocks: str, variant: Variant
    ) -> TracedGradients:
        key = (variant, precision, blocks)
        if key not in self._traced:
            traced = self._program(precision, blocks).traced
            self._traced[key] = trace_gradients(traced, self._mesh, variant)
        return self._traced[key]

    def _traced_blocks(self, plan: Plan) -> str:
        """Return how blocks run in the program that is traced for a plan.

        Blocks that run one by one follow from a loop over them, which is traced faster, unless
        an iteration has several blocks and computes all of them again.
        """
        blocks = _blocks(plan)
        if blocks == "unroll" and self.num_blocks:
            alone = plan.sharding.remat == "none" or self._one_block_at_a_time
            return "scan" if alone else blocks
        return blocks

    @cached_property
    def _one_block_at_a_time(self) -> bool:
        """Whether an iteration of the loop over blocks runs one block."""
        layout = self._program(self._precision, "scan").traced.layout
        first = [layout.leaves[s.sources[0]].path for s in layout.step_leaves if s.stacked]
        return len({re.sub(r"\b\d+\b", "*", path) for path in first}) == len(first)

    def _program(self, precision: Precision, blocks: Any) -> StepProgram:
        key = (precision, blocks)
        if key not in self._programs:
            plan = self._traced_plan(precision, blocks)
            if blocks == "unroll":
                made = step_program(self._loss, self._leaves, self._samples, plan)
            else:
                made = unstaged_program(self._program(precision, "unroll").traced, plan)
            self._programs[key] = made
        return self._programs[key]

    def _traced_plan(self, precision: Precision, blocks: Any) -> Plan:
        return Plan(
            mesh={},
            batch=solve_batch(replicas=1, global_batch_size=SAMPLES),
            sharding=ShardingConfig(blocks=blocks),
            precision=precision,
        )

    def _staged(self, plan: Plan) -> StepProgram:
        """Return the program whose leaves a plan's step has."""
        stages = plan.size("pipe")
        if stages == 1:
            return self._program(plan.precision, plan.sharding.blocks)
        key = (plan.precision, stages, plan.num_chunks)
        if key not in self._programs:
            cut = ordered_by_stage(self._cut(plan.precision), stages, plan.num_chunks)
            self._programs[key] = StepProgram(cut.traced, cut, ())
        return self._programs[key]

    def _cut(self, precision: Precision) -> BlockCut:
        """Return the program cut into its blocks, which is the same for any number of stages."""
        if precision not in self._cuts:
            traced = self._program(precision, "unroll").traced
            rolled = roll_program(traced, evenly_joined=True)
            self._cuts[precision] = cut_blocks(rolled.traced, rolled.remarks)
        return self._cuts[precision]

    def _tensor_choice(self, plan: Plan) -> TensorChoice:
        key = (plan.precision, _blocks(plan), plan.size("tensor"))
        if key not in self._tensor:
            self._tensor[key] = choose_tensor_dims(self._dim_classes(plan), plan.size("tensor"))
        return self._tensor[key]

    def _dim_classes(self, plan: Plan) -> DimClasses:
        key = (plan.precision, _blocks(plan))
        if key not in self._classes:
            self._classes[key] = dim_classes(self._program(*key).traced)
        return self._classes[key]

    def _state_key(self, plan: Plan) -> tuple[Any, ...]:
        sizes = tuple((axis, size) for axis, size in plan.mesh.items() if axis != "data")
        return sizes, plan.sharding.model_dump_json(), plan.precision, plan.num_chunks

    def _state(self, plan: Plan) -> PlacedState:
        key = self._state_key(plan)
        if key not in self._states:
            sizes = {axis: size for axis, size in plan.mesh.items() if axis != "data"}
            program = self._staged(plan)
            layout = program.traced.layout
            if program.cut is None:
                classes, tensor = self._dim_classes(plan), self._tensor_choice(plan)
                divided = place_leaves(program.traced, classes, tensor, sizes, plan.sharding)
                staged: set[int] = set()
            else:
                staged = {stack.number for stack in program.cut.stacks}
                divided = self._place_stages(program.cut, plan, sizes, staged)
            optimizer, zero = self._flat_optimizer(layout, divided, sizes), plan.sharding.zero
            self._states[key] = place_state(
                layout, divided, sizes, optimizer, zero=zero, staged=staged
            )
        return self._states[key]

    def _place_stages(
        self, cut: BlockCut, plan: Plan, sizes: Mapping[str, int], staged: Collection[int]
    ) -> tuple[Placement, ...]:
        """Return the placements of a program in stages; its dims do not depend on their number."""
        key = (plan.precision, "stages")
        if key not in self._classes:
            self._classes[key] = dim_classes(self._cut(plan.precision).traced)
        classes, tensor = self._classes[key], (*key, plan.size("tensor"))
        if tensor not in self._tensor:
            self._tensor[tensor] = choose_tensor_dims(classes, plan.size("tensor"))
        chosen = self._tensor[tensor]
        divided = place_leaves(cut.traced, classes, chosen, sizes, plan.sharding, staged)
        return place_on_stages(cut, divided, plan.size("pipe"), plan.num_chunks)

    def _flat_optimizer(
        self, layout: Layout, divided: Sequence[Placement], sizes: Mapping[str, int]
    ) -> FlatOptimizer:
        """Return the optimizer for a layout, which is traced once for all meshes."""
        if id(layout) not in self._flat_optimizers:
            own = [divided[n] for n, s in enumerate(layout.step_leaves) if s.leaf.role == "param"]
            # Whether stacks are treated like their blocks does not depend on the order of blocks.
            stacks = sorted((s.leaf.path, s.sources) for s in layout.step_leaves if s.stacked)
            alike = next((known for paths, known in self._alike if paths == stacks), None)
            flat = FlatOptimizer(self._optimizer, layout, own, sizes, stacks_alike=alike)
            if stacks and alike is None:
                self._alike.append((stacks, flat.stacks_alike))
            # The layout is kept, so that no other one gets its number.
            self._flat_optimizers[id(layout)] = (layout, flat)
        return self._flat_optimizers[id(layout)][1]


def _with_part_sums(peak: Peak, program: GradientProgram, sizes: DeviceSizes) -> Peak:
    """Add what a loss in parts adds its gradients up in."""
    if not any(sizes.rows > limit for limit in sizes.row_limit.values()):
        return peak
    uses: dict[Use, float] = dict(peak.uses)
    uses["working"] += program.part_sums
    return Peak(peak.nbytes + program.part_sums, uses, peak.largest)


def _blocks(plan: Plan) -> str:
    """Return how the blocks of a plan run; stages scan theirs."""
    return "scan" if plan.size("pipe") > 1 else plan.sharding.blocks


def _in_blocks(step: StepLeaf) -> bool:
    """Whether a leaf belongs to a repeated block, whose weights are gathered in each pass."""
    return step.stacked or any(part.isdigit() for part in step.leaf.path.split("."))


def _divides(classes: DimClasses, size: int) -> bool:
    try:
        check_tensor_size(classes, choose_tensor_dims(classes, size))
    except UserError:
        return False
    return True


def _peak_share(chip: Chip, precision: Precision) -> float:
    return _product_share(chip, precision) / chip.product_share


def _product_share(chip: Chip, precision: Precision) -> float:
    shares = {"no": chip.float32_share, "bf16": chip.bfloat16_share, "fp16": chip.float16_share}
    return chip.product_share * shares[precision]
