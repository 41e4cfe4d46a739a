"""Estimates of plans for one model, from its traced program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.hardware import Hardware
from meshwright.mesh.build import build_mesh
from meshwright.plan import Plan
from meshwright.planner.estimate import Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.gradient_program import (
    SAMPLES,
    GradientProgram,
    Variant,
    trace_gradients,
)
from meshwright.planner.in_memory import Peak, peak_of
from meshwright.planner.placed_state import PlacedState, place_state
from meshwright.planner.sizes import DeviceSizes
from meshwright.program.dims import DimClasses
from meshwright.program.trace.build_model import ModelSource, describe_model
from meshwright.program.trace.traced_loss import Loss
from meshwright.sharding.decide import dim_classes, place_leaves
from meshwright.sharding.tensor import TensorChoice, choose_tensor_dims
from meshwright.step.step_program import StepProgram, step_program
from meshwright.trees import Batch, resize_batch

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
    """

    def __init__(
        self,
        model: ModelSource,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        *,
        trainable: Filter = nnx.Param,
    ) -> None:
        self._loss, self._optimizer = loss, optimizer
        self._leaves = describe_model(model, trainable)
        self._samples = resize_batch(batch, SAMPLES)
        self._mesh = build_mesh({}, jax.devices()[:1])
        self._programs: dict[Any, StepProgram] = {}
        self._classes: dict[Any, DimClasses] = {}
        self._tensor: dict[Any, TensorChoice] = {}
        self._gradients: dict[Any, GradientProgram] = {}
        self._states: dict[Any, PlacedState] = {}
        self._peaks: dict[Any, Peak] = {}

    @cached_property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(math.prod(leaf.shape) for leaf in self._leaves.leaves if leaf.is_weight)

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        """Return what a plan needs on some hardware."""
        memory = self._memory(plan, hardware)
        return Estimate(plan, hardware, memory, TimeEstimate(compute=1.0))

    def _memory(self, plan: Plan, hardware: Hardware) -> MemoryEstimate:
        state = self._state(plan)
        peak = self._peak(plan, hardware)
        steps = plan.batch.gradient_accumulation_steps
        rows = plan.batch.micro_batch_size * steps
        samples = sum(leaf.size * leaf.dtype.itemsize for leaf in self._batch_leaves())
        gradients = peak.uses["gradients"] + (state.sums if steps > 1 else 0)
        return MemoryEstimate(
            parameters=state.parameters,
            optimizer=state.optimizer,
            gradients=round(max(gradients, state.gradients)),
            batch=round(samples / SAMPLES * rows),
            gathered=round(peak.uses["gathered"]),
            activations=round(peak.uses["activations"]),
            working=round(peak.uses["working"]),
        )

    def _batch_leaves(self) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self._samples)
        ]

    def _peak(self, plan: Plan, hardware: Hardware) -> Peak:
        key = (plan.sharding, plan.mesh.get("fsdp"), plan.mesh.get("tensor"), plan.precision,
               plan.batch.micro_batch_size, hardware.chip.platform, plan.kernels)  # fmt: skip
        key = str(key)
        if key not in self._peaks:
            program = self._gradient_program(plan, hardware)
            self._peaks[key] = peak_of(program.lifetimes, self._sizes(plan, program, hardware))
        return self._peaks[key]

    def _sizes(self, plan: Plan, program: GradientProgram, hardware: Hardware) -> DeviceSizes:
        rows = plan.batch.micro_batch_size / SAMPLES
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
            program.gradients,
            transposes=hardware.chip.platform == "cpu",
            row_limit=limits,
        )

    def _gradient_program(self, plan: Plan, hardware: Hardware) -> GradientProgram:
        sharding = plan.sharding
        variant = Variant(
            sharding.remat,
            gathers=plan.size("fsdp") > 1 and sharding.zero == 3 and not sharding.keep_gathered,
            rows=plan.size("tensor") == 1,
            kernels=plan.kernels,
            platform=PLATFORMS[hardware.chip.platform],
        )
        key = (variant, plan.precision, sharding.blocks)
        if key not in self._gradients:
            traced = self._program(plan.precision, sharding.blocks).traced
            self._gradients[key] = trace_gradients(traced, self._mesh, variant, plan.precision)
        return self._gradients[key]

    def _program(self, precision: Precision, blocks: Any) -> StepProgram:
        key = (precision, blocks)
        if key not in self._programs:
            plan = Plan(
                mesh={},
                batch=solve_batch(replicas=1, global_batch_size=SAMPLES),
                sharding=ShardingConfig(blocks=blocks),
                precision=precision,
            )
            self._programs[key] = step_program(self._loss, self._leaves, self._samples, plan)
        return self._programs[key]

    def _tensor_choice(self, plan: Plan) -> TensorChoice:
        key = (plan.precision, plan.sharding.blocks, plan.size("tensor"))
        if key not in self._tensor:
            self._tensor[key] = choose_tensor_dims(self._dim_classes(plan), plan.size("tensor"))
        return self._tensor[key]

    def _dim_classes(self, plan: Plan) -> DimClasses:
        key = (plan.precision, plan.sharding.blocks)
        if key not in self._classes:
            self._classes[key] = dim_classes(self._program(*key).traced)
        return self._classes[key]

    def _state(self, plan: Plan) -> PlacedState:
        sizes = {axis: size for axis, size in plan.mesh.items() if axis != "data"}
        key = str((sizes, plan.sharding, plan.precision))
        if key not in self._states:
            traced = self._program(plan.precision, plan.sharding.blocks).traced
            divided = place_leaves(
                traced, self._dim_classes(plan), self._tensor_choice(plan), sizes, plan.sharding
            )
            self._states[key] = place_state(
                traced.layout, divided, sizes, self._optimizer, zero=plan.sharding.zero
            )
        return self._states[key]
