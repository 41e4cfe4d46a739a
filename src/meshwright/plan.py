"""The Plan: the complete, frozen answer to how a model is trained on these devices."""

from __future__ import annotations

import math
from typing import Any, Self

import yaml
from pydantic import Field, field_validator, model_validator

from meshwright.config.base import Frozen
from meshwright.config.batch import Batch, solve_batch
from meshwright.config.schema import (
    Config,
    PipelineConfig,
    Precision,
    ShardingConfig,
)
from meshwright.errors import UserError
from meshwright.mesh.axes import (
    INFER,
    canonical_sizes,
    describe_sizes,
    resolve_sizes,
    shown_sizes,
)

PIPELINE_MICROBATCHES_PER_STAGE = 4


class Plan(Frozen):
    """How a model is trained on these devices; everything below the config only reads it.

    Attributes:
        mesh: axis sizes larger than 1, outermost first; empty on one device.
        batch: samples per update, per device and per microbatch.
        sharding: what is sharded, how long gathered weights live, rules, remat.
        schedule: pipeline schedule; null without a pipe axis.
        num_microbatches: microbatches the pipeline works on per update; 1 without a pipe axis.
        precision: compute format: no (float32), bf16 or fp16.
        matmul: precision of float32 matrix products.
    """

    mesh: dict[str, int]
    batch: Batch
    sharding: ShardingConfig = ShardingConfig()
    schedule: str | None = None
    num_microbatches: int = Field(default=1, ge=1)
    precision: Precision = "no"
    matmul: str = "default"

    @field_validator("mesh")
    @classmethod
    def _resolved(cls, mesh: dict[str, int]) -> dict[str, int]:
        if INFER in mesh.values():
            raise ValueError("the sizes of a plan are all known; write one instead of -1")
        return shown_sizes(canonical_sizes(mesh))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        replicas = self.size("data") * self.size("fsdp")
        if self.batch.replicas != replicas:
            raise UserError(
                "the plan's batch does not fit its mesh",
                why=f"data={self.size('data')} × fsdp={self.size('fsdp')} = {replicas}, "
                f"but batch.replicas is {self.batch.replicas}",
                fix=f"write batch.replicas: {replicas}",
            )
        return self

    @property
    def num_devices(self) -> int:
        """Devices the plan is for."""
        return math.prod(self.mesh.values())

    def size(self, axis: str) -> int:
        """Return the size of an axis; axes that are not in the mesh have size 1."""
        return self.mesh.get(axis, 1)

    def describe(self) -> str:
        """Return the plan in one line."""
        batch = self.batch
        parts = [
            describe_sizes(self.mesh),
            f"batch {batch.global_batch_size} = {batch.micro_batch_size} × {batch.replicas} "
            f"× {batch.gradient_accumulation_steps}",
            f"precision {self.precision}",
        ]
        if self.schedule:
            parts.append(f"{self.schedule} with {self.num_microbatches} microbatches")
        return ", ".join(parts)

    def to_yaml(self) -> str:
        """Return the plan as YAML; `from_yaml` gives an equal plan back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read a plan written by `to_yaml`."""
        try:
            values: Any = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise UserError("the plan is not valid YAML", why=str(error)) from None
        if not isinstance(values, dict):
            raise UserError("the plan is empty or not a mapping")
        return cls.parse({str(key): value for key, value in values.items()}, prefix="plan")


def make_plan(config: Config, num_devices: int) -> Plan:
    """Produce the plan a config describes for so many devices."""
    sizes = resolve_sizes(mesh_sizes(config), num_devices)
    schedule, microbatches = _pipeline(config.pipeline, sizes.get("pipe", 1))
    training = config.training
    batch = solve_batch(
        replicas=sizes.get("data", 1) * sizes.get("fsdp", 1),
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        sync_gradients_every=training.sync_gradients_every,
    )
    return Plan(
        mesh=shown_sizes(sizes),
        batch=batch,
        sharding=config.sharding,
        schedule=schedule,
        num_microbatches=microbatches,
        precision=precision(config),
        matmul=config.precision.matmul,
    )


def check_supported(plan: Plan) -> None:
    """Refuse what a plan can describe but no step can run yet."""
    stages = plan.size("pipe")
    if stages > 1:
        fsdp = stages * plan.size("fsdp")
        without = {axis: size for axis, size in plan.mesh.items() if axis != "pipe"}
        raise UserError(
            "pipeline parallelism is not available yet",
            why=f"the mesh is {describe_sizes(plan.mesh)}, with {stages} pipeline stages",
            fix="use mesh.fsdp or mesh.tensor for these devices: "
            + describe_sizes(canonical_sizes({**without, "fsdp": fsdp})),
        )


def unused_settings(config: Config, plan: Plan) -> list[str]:
    """Name, in a sentence each, settings that were given and change nothing in a run."""
    unused: list[str] = []
    if plan.size("pipe") == 1 and config.pipeline != PipelineConfig():
        given = config.pipeline.model_dump(exclude_defaults=True)
        text = " ".join(f"pipeline.{key}={value}" for key, value in given.items())
        unused.append(f"{text} has no effect: the mesh {describe_sizes(plan.mesh)} has no pipe")
    if config.hardware is not None:
        unused.append(
            f"hardware={config.hardware} has no effect on a run, which uses the devices at hand"
        )
    return unused


def mesh_sizes(config: Config) -> dict[str, int]:
    """Return the mesh asked for, by ``mesh`` or by ``model.mesh_shape``; one size may be -1."""
    asked = config.mesh.sizes()
    if config.model.mesh_shape is None:
        return asked
    shape, names = config.model.mesh_shape
    if len(shape) != len(names):
        raise UserError(
            f"model.mesh_shape has {len(shape)} sizes and {len(names)} names",
            fix='write model.mesh_shape=[[4,2],["fsdp","tp"]]',
        )
    if len(set(names)) != len(names):
        raise UserError(f"model.mesh_shape names an axis twice: {', '.join(names)}")
    spelled = canonical_sizes(dict(zip(names, shape, strict=True)))
    full = {axis: spelled.get(axis, 1) for axis in asked}
    given = config.mesh.model_fields_set
    differing = [a for a in full if a in given and asked[a] not in (full[a], INFER)]
    if differing:
        raise UserError(
            "model.mesh_shape and mesh contradict each other",
            why="; ".join(
                f"{axis} is {full[axis]} by model.mesh_shape and {asked[axis]} by mesh.{axis}"
                for axis in differing
            ),
            fix="write one of the two",
        )
    return full


def precision(config: Config) -> Precision:
    """Return the compute format, by ``precision`` or by ``training.mixed_precision``."""
    mixed, compute = config.training.mixed_precision, config.precision.compute
    if mixed and compute and mixed != compute:
        raise UserError(
            "training.mixed_precision and precision contradict each other",
            why=f"training.mixed_precision={mixed}, precision.compute={compute}",
            fix="write one of the two",
        )
    return mixed or compute or "no"


def _pipeline(pipeline: PipelineConfig, stages: int) -> tuple[str | None, int]:
    if stages == 1:
        return None, 1
    return pipeline.schedule, pipeline.num_microbatches or PIPELINE_MICROBATCHES_PER_STAGE * stages
