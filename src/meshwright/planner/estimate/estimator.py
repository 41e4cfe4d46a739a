"""Estimates of plans for one model, from its traced program."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from meshwright.config.schema import Precision
from meshwright.errors import UserError
from meshwright.hardware import Hardware
from meshwright.ledgers.minimum import Needed
from meshwright.mesh.axes import CONTEXT, MODEL_AXES
from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import CPU_MARGIN, Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.estimate.model_states import ModelStates, PlacedState, state_key
from meshwright.planner.estimate.rollout_needs import RolloutNeeds
from meshwright.planner.estimate.traced_programs import (
    GradientPrograms,
    TracedPrograms,
    blocks_of,
    least_work,
    variant_of,
)
from meshwright.planner.estimate.traffic import sent_by_stages, time_traffic
from meshwright.planner.workload.gpu_rules import (
    DELAYED_GRADIENTS,
    LAST_ITERATION_TWICE,
    STAGE_MICROBATCHES,
    STAGE_OVERHEAD,
)
from meshwright.planner.workload.gradient_program import SAMPLES, GradientProgram, Variant
from meshwright.planner.workload.in_memory import Peak, peak_of, working_in
from meshwright.planner.workload.sizes import DeviceSizes, Use
from meshwright.planner.workload.stage_parts import (
    BlockParts,
    count_slots,
    nbytes_of,
    saved_by_iteration,
    share_of_waiting,
)
from meshwright.planner.workload.work_table import Works, seconds_of
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.sample_mean import find_mixing
from meshwright.program.dims.sample_values import MixedSamplesError
from meshwright.program.flops import DTYPES
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.trace.build_model import ModelSource, describe_model
from meshwright.program.trace.choose_adapters import adapt_model
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss
from meshwright.program.trace.trained_leaves import Trained
from meshwright.runtime.activity import activity
from meshwright.sharding.tensor import TensorChoice, check_tensor_size, choose_tensor_dims
from meshwright.trees import Batch, resize_batch, tokens_per_sample

_TENSOR_SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)


class _Case(NamedTuple):
    """A plan on some hardware, with the program that it is estimated from."""

    plan: Plan
    hardware: Hardware
    variant: Variant


class Estimator:
    """Estimates plans for one model, loss and optimizer, from the traced program.

    Programs are traced for two samples and one device, once for each way to save activations; what
    a plan needs follows from how its mesh shards their arrays. Nothing is allocated. What does not
    depend on a plan, such as the number of blocks, is read from the program in ``precision``, the
    compute format of most plans. ``rollout`` says what rollouts need, if there are any.
    """

    @activity("tracing the model")
    def __init__(
        self,
        model: ModelSource,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        *,
        trainable: Trained = nnx.Param,
        precision: Precision = "no",
        rollout: RolloutNeeds | None = None,
    ) -> None:
        self._precision: Precision = precision
        self._rollout = rollout
        self._samples = resize_batch(batch, SAMPLES)
        self._leaves = adapt_model(describe_model(model, trainable), loss, self._samples)
        self._programs = TracedPrograms(loss, self._leaves, self._samples, precision)
        self._gradients = GradientPrograms(self._programs)
        self._states = ModelStates(self._programs, optimizer)
        self._peaks: dict[Any, Peak] = {}
        self._parts: dict[Any, Mapping[int, int]] = {}
        self._seconds: dict[Any, tuple[float, float]] = {}

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        return self._leaves.num_parameters

    @property
    def num_blocks(self) -> int:
        """The number of repeated blocks, which pipeline stages divide; 0 without such blocks."""
        return self._programs.num_blocks

    @cached_property
    def tensor_sizes(self) -> frozenset[int]:
        """The sizes of a tensor axis, up to 64, that divide the dims it would shard."""
        classes = self._programs.classes(self._precision, "scan")
        return frozenset(size for size in _TENSOR_SIZES if _divides(classes, size))

    @property
    def keeps_statistics(self) -> bool:
        """Whether the model keeps statistics of the samples, such as the means of BatchNorm."""
        return self._programs.keeps_statistics

    @cached_property
    def sample_mixing(self) -> MixedSamplesError | None:
        """Where the loss mixes samples other than by sums; None if it does not."""
        return find_mixing(self._programs.classes(self._precision, "scan"))

    @property
    def has_rollouts(self) -> bool:
        """Whether the model completes prompts before it learns from them."""
        return self._rollout is not None

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample; 1 for data other than tokens."""
        return tokens_per_sample(self._samples) or 1

    def row_obstacle(self, sizes: Mapping[str, int]) -> str:
        """Return why a context axis cannot divide the model's rows; empty if it can."""
        try:
            own = tuple((axis, sizes[axis]) for axis in ("tensor", CONTEXT))
            self._states.attention(self._precision, "scan", own)
        except UserError as error:
            return error.what
        return ""

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return what a plan needs on some hardware. Milliseconds: a search asks for thousands."""
        return self._estimate(_Case(plan, hardware, variant_of(plan, hardware)))

    def bound(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return an estimate from the program that does least, which few meshes have.

        All meshes share it, so that no others are traced for plans that are far too slow.
        """
        return self._estimate(_Case(plan, hardware, least_work(variant_of(plan, hardware))))

    def sharded_share(self, plan: Plan, axis: str) -> float:
        """Return how much of the training state an axis of a plan shards, from 0 to 1.

        That is what a device is spared, relative to an axis that divides every dim. Below zero 3,
        fsdp shards the optimizer's state alone.
        """
        mesh = {name: size for name, size in plan.mesh.items() if name != axis}
        own = self._states.of(plan)
        other = self._states.of(plan.model_copy(update={"mesh": mesh}))
        held, whole = own.optimizer, other.optimizer
        if axis != "fsdp" or plan.sharding.zero == 3:
            held, whole = held + own.parameters, whole + other.parameters
        return (1 - held / whole) / (1 - 1 / plan.size(axis)) if whole else 1.0

    def works(self, plan: Plan, hardware: Hardware) -> Works:
        """Return what the kernels of one microbatch do on a device, all stages together."""
        return self._works(_Case(plan, hardware, variant_of(plan, hardware)))

    def _estimate(self, case: _Case) -> Estimate:
        return Estimate(case.plan, case.hardware, self._time(case), partial(self._memory, case))

    def _works(self, case: _Case) -> Works:
        program = self._gradients.of(case.plan, case.variant)
        return program.work.on(replace(self._sizes(case, program), row_limit={}, _known={}))

    def _time(self, case: _Case) -> TimeEstimate:
        plan, hardware = case.plan, case.hardware
        chip, stages = hardware.chip, plan.size("pipe")
        in_loops, outside = self._kernel_seconds(case)
        state = self._states.of(plan)
        # The optimizer reads gradients twice, for their norm and the update; the rest once.
        moved = 2 * (state.parameters + state.optimizer) + 2 * state.gradients
        update = moved / (chip.hbm_tb_per_s_per_device * 1e12 * chip.hbm_share)
        steps = plan.batch.gradient_accumulation_steps
        # Blocks are sharded over stages; the last stage also computes the loss.
        compute = steps * (in_loops / stages + outside)
        bubble = staging = 0.0
        if stages > 1:
            overheads = STAGE_OVERHEAD.value
            staging = compute * (overheads.get(_staged(plan)[0], overheads["1f1b"]) - 1)
            waits = share_of_waiting(*_staged(plan))
            bubble = (compute + staging) * waits / (1 - waits)
        return TimeEstimate(
            compute=compute + update,
            traffic=time_traffic(self._sent(case, state), plan, hardware, compute + staging),
            bubble=bubble,
            staging=staging,
            flops=self._programs.flops_per_sample(plan.precision) * plan.batch.global_batch_size,
            peak_flops=chip.peak_of(DTYPES[plan.precision]) * hardware.count,
        )

    def _kernel_seconds(self, case: _Case) -> tuple[float, float]:
        """Return the seconds of one microbatch's kernels: in loops, and outside of them."""
        plan, chip = case.plan, case.hardware.chip
        sharded = (*map(plan.size, MODEL_AXES), plan.size(CONTEXT), plan.sharding.zero)
        program = (case.variant, plan.precision, blocks_of(plan), plan.batch.micro_batch_size)
        key = (*program, sharded, chip)
        if key not in self._seconds:
            rate = chip.peak_of(DTYPES[plan.precision]) * chip.product_share
            works = self._works(case)
            seconds = works.times * seconds_of(works, chip, rate)
            looped = float(seconds[works.in_loop].sum())
            self._seconds[key] = looped, float(seconds.sum()) - looped
        return self._seconds[key]

    def _sent(self, case: _Case, state: PlacedState) -> list[list[Needed]]:
        plan, messages = case.plan, (0.0, 0.0)
        program = self._gradients.of(plan, case.variant)
        if plan.size("pipe") > 1 and program.blocks is not None:
            carried = nbytes_of(program.blocks.carried, self._sizes(case, program))
            rounds = plan.batch.gradient_accumulation_steps // plan.num_microbatches
            messages = carried, count_slots(*_staged(plan)).messages * rounds
        return sent_by_stages(
            state.weights,
            self._states.events(plan),
            plan,
            attention=self._states.exchanges(plan, case.variant.platform),
            scale=plan.batch.micro_batch_size / SAMPLES,
            num_blocks=self._programs.num_blocks,
            messages=messages,
        )

    def _memory(self, case: _Case) -> MemoryEstimate:
        found, rollout = self._step_memory(case), self._rollout
        return rollout.added_to(found, case.plan, self._states.of(case.plan)) if rollout else found

    def _step_memory(self, case: _Case) -> MemoryEstimate:
        plan, state = case.plan, self._states.of(case.plan)
        steps = plan.batch.gradient_accumulation_steps
        traced = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._samples))
        batch = round(traced / SAMPLES * plan.batch.micro_batch_size * steps)
        sums = state.sums if steps > 1 else 0
        if case.variant.platform == "cpu":
            return _with_margin(state, batch, max(state.gradients, sums))
        if steps > 1 and plan.size("pipe") == 1 and _delays_gradients(case):
            sums += state.gradients
        peak = self._peak(case)
        # Before the optimizer runs there are all gradients, and nothing else.
        last = max(state.gradients, sums)
        missing = max(0.0, last - peak.nbytes - sums)
        return MemoryEstimate(
            parameters=state.parameters,
            optimizer=state.optimizer,
            gradients=round(peak.uses["gradients"] + sums + missing),
            batch=batch,
            gathered=round(peak.uses["gathered"]),
            activations=round(peak.uses["activations"]),
            working=round(peak.uses["working"]),
            all_gradients=last,
        )

    def _recomputed(self, case: _Case) -> float:
        """Return what a block of a stage keeps when its backward pass recomputes it."""
        if case.plan.sharding.remat != "full":
            return 0.0
        kept = case._replace(variant=case.variant._replace(remat="none"))
        program = self._gradients.of(kept.plan, kept.variant)
        if program.blocks is None:
            return 0.0
        return saved_by_iteration(program.blocks.forward, self._sizes(kept, program))

    def _held_twice(self, case: _Case, program: GradientProgram, sizes: DeviceSizes) -> float:
        """Return the bytes of the rule `LAST_ITERATION_TWICE`; 0 where it does not apply."""
        plan, blocks = case.plan, program.blocks
        applies = LAST_ITERATION_TWICE.on(case.variant.platform) and blocks_of(plan) == "scan"
        if blocks is None or not plan.gathers_twice or not applies:
            return 0.0
        return saved_by_iteration(blocks.forward, sizes)

    def _stage_peak(
        self, case: _Case, whole: Peak, program: GradientProgram, sizes: DeviceSizes
    ) -> Peak:
        """Return the peak of a pipeline stage.

        Besides the slots of its schedule, it runs blocks or computes the loss. It keeps what it
        recomputes for each block after the first (rule `STAGE_RECOMPUTES`).
        """
        plan, blocks = case.plan, program.blocks
        assert blocks is not None
        slots = count_slots(*_staged(plan))
        depth = _depth(plan, blocks)
        each = nbytes_of(blocks.saved, sizes) * depth
        carried = nbytes_of(blocks.carried, sizes) * slots.carried
        working = partial(working_in, program.timeline, sizes, blocks.backward)
        at_hand = STAGE_MICROBATCHES.value * each
        own = working(inside=True) + at_hand + self._recomputed(case) * max(0.0, depth - 1)
        gradients, gathered = _outside_of_stages(plan, self._states.of(plan))
        uses: dict[Use, float] = {
            # There are the gradient of a microbatch and the sum of them.
            "gradients": 2 * gradients,
            "gathered": whole.uses["gathered"] + gathered,
            "activations": each * (slots.saved + slots.cuts) + carried,
            "working": max(own, working(inside=False) + _part_sums(program, sizes)),
        }
        return Peak(sum(uses.values()), uses)

    def _peak(self, case: _Case) -> Peak:
        plan = case.plan
        program = self._gradients.of(plan, case.variant)
        sizes = self._sizes(case, program)
        # A state does not depend on data, but how its gradients are reduced does.
        key = (state_key(plan), case.variant, sizes.rows, sizes.reduced_last)
        if key not in self._peaks:
            in_place = _part_sums(program, sizes) if _sums_in_place(plan) else 0.0
            self._peaks[key] = peak_of(program.timeline, sizes, in_place)
        whole, blocks = self._peaks[key], program.blocks
        if plan.size("pipe") == 1:
            whole = _with(whole, "activations", self._held_twice(case, program, sizes))
            exchanges = self._states.exchanges(plan, case.variant.platform)
            whole = _with(whole, *_other_keys(plan, exchanges))
            added = 0.0 if _sums_in_place(plan) else _part_sums(program, sizes)
            return _with(whole, "working", added)
        if blocks is None:
            return whole
        return self._stage_peak(case, whole, program, sizes)

    def _sizes(self, case: _Case, program: GradientProgram) -> DeviceSizes:
        plan = case.plan
        # A part of a row is computed, and kept, like a part of a sample.
        rows = plan.batch.micro_batch_size / SAMPLES / plan.size(CONTEXT)
        # The leaves are those of the program that was traced.
        blocks = self._programs.traced_blocks(plan)
        if blocks != plan.sharding.blocks:
            sharding = plan.sharding.model_copy(update={"blocks": blocks})
            plan = plan.model_copy(update={"sharding": sharding})
        key = (case.variant, plan.precision, blocks, plan.size("tensor"))
        if key not in self._parts:
            self._parts[key] = _parts(program.classes, self._states.tensor_choice(plan))
        parts = program.loss_parts
        limits = {c: most / (parts.token_rows * SAMPLES) for c, most in parts.row_limit.items()}
        return DeviceSizes(
            rows,
            program.classes.batch,
            self._parts[key],
            self._states.of(plan).shares,
            row_limit=limits,
            loops=program.blocks is None or _depth(plan, program.blocks) > 1,
            reduced_last=_reduces_last(case.plan),
        )


def _divides(classes: DimClasses, size: int) -> bool:
    try:
        check_tensor_size(classes, choose_tensor_dims(classes, size))
    except UserError:
        return False
    return True


def _other_keys(plan: Plan, attention: Sequence[AttentionLayouts]) -> tuple[Use, float]:
    """Return the bytes of what a device gathers of the keys and values of other positions.

    Blocks that gather it again have it one at a time, and its gradients as well.
    """
    others = plan.batch.micro_batch_size / SAMPLES * (1 - 1 / plan.size(CONTEXT))
    keys = [sum(n for kind, n, _ in one.sent if kind == "all-gather") for one in attention]
    if plan.sharding.remat != "none" or plan.gathers_twice:
        return "working", others * 2 * max(keys, default=0.0)
    times = [one.times for one in attention]
    return "activations", others * sum(n * t for n, t in zip(keys, times, strict=True))


def _parts(classes: DimClasses, tensor: TensorChoice) -> dict[int, int]:
    """Return into how many parts a tensor axis shards each class of dims."""
    parts: dict[int, int] = {}
    for leaf in classes.leaves:
        choice = tensor.leaves.get(leaf.path)
        if choice is not None and choice.dim is not None:
            parts |= {factor.id: tensor.size for factor in leaf.dims[choice.dim][:1]}
    return parts


def _with_margin(state: PlacedState, batch: int, gradients: int) -> MemoryEstimate:
    """Return the memory on CPUs: state, gradients and batch, and as much again for the rest."""
    exact = state.parameters + state.optimizer + gradients + batch
    return MemoryEstimate(
        parameters=state.parameters,
        optimizer=state.optimizer,
        gradients=gradients,
        batch=batch,
        reserved=round(CPU_MARGIN * exact),
        all_gradients=gradients,
    )


def _delays_gradients(case: _Case) -> bool:
    """Whether the rule `DELAYED_GRADIENTS` applies: one GPU has no communication to hide."""
    platform = case.variant.platform
    return DELAYED_GRADIENTS.on(platform) and (platform != "gpu" or case.plan.num_devices > 1)


def _staged(plan: Plan) -> tuple[str, int, int, int]:
    """Return the schedule of a plan's stages: its name, chunks, microbatches and stages."""
    return plan.schedule or "1f1b", plan.num_chunks, plan.num_microbatches, plan.size("pipe")


def _outside_of_stages(plan: Plan, state: PlacedState) -> tuple[float, float]:
    """Return the bytes, on each stage, of what no stage owns, such as an embedding.

    First those of gradients, as fsdp shards them; then those of parameters, gathered over the
    stages, and of what a stage computes with: gathered over fsdp, or cast.
    """
    shards, zero, whole = plan.size("fsdp"), plan.sharding.zero, state.outside
    parameters = whole / (shards if zero == 3 else 1)
    if COMPUTE_DTYPES[plan.precision] is None:
        computed = whole if parameters < whole else 0.0
    else:
        computed = whole / 2 + (state.parameters / 2 if shards == 1 else 0.0)
    return whole / (shards if zero > 1 else 1), parameters + computed


def _depth(plan: Plan, blocks: BlockParts) -> float:
    """Return how many iterations of the loop over blocks a chunk of a stage has."""
    return math.ceil(blocks.forward.times / plan.size("pipe")) / plan.num_chunks


def _part_sums(program: GradientProgram, sizes: DeviceSizes) -> float:
    """Return the bytes that a loss in parts adds its gradients up in; 0 if it is not in parts."""
    in_parts = any(sizes.rows > limit for limit in sizes.row_limit.values())
    shards = max((sizes.tensor.get(each, 1) for each in sizes.row_limit), default=1)
    return program.loss_parts.sums / shards if in_parts else 0.0


def _reduces_last(plan: Plan) -> bool:
    """Whether the rule `REDUCED_LAST` applies."""
    hybrid = plan.size("data") > 1 and plan.size("fsdp") > 1 and plan.sharding.zero > 1
    return hybrid and blocks_of(plan) == "unroll"


def _sums_in_place(plan: Plan) -> bool:
    """Whether the rule `SUMMED_IN_PLACE` applies."""
    return blocks_of(plan) == "unroll"


def _with(peak: Peak, use: Use, nbytes: float) -> Peak:
    """Return a peak with more bytes of one use."""
    uses: dict[Use, float] = {**peak.uses, use: peak.uses[use] + nbytes}
    return Peak(peak.nbytes + nbytes, uses)
