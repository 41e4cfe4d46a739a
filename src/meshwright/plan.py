"""The plan: a frozen record of how a model is trained on these devices."""

import math
from collections.abc import Mapping
from typing import Any, Self

import yaml
from pydantic import Field, field_validator, model_validator

from meshwright.config.argument_checks import check_kind
from meshwright.config.base import Frozen
from meshwright.config.batch import Batch, check_file_batch
from meshwright.config.microbatches import check_sync, nearest_microbatches, solve_pipeline_batch
from meshwright.config.schema import Config, KernelChoice, PipelineConfig, Precision, ShardingConfig
from meshwright.errors import Setting, UserError, yaml_line
from meshwright.mesh.axes import (
    CONTEXT,
    INFER,
    PIPE,
    canonical_sizes,
    describe_sizes,
    mesh_setting,
    nearest_sizes,
    resolve_sizes,
    shown_sizes,
)
from meshwright.text.units import counted, either
from meshwright.text.yaml_text import read_yaml

MADE_FOR = "made_for"
"""The key of a plan file that names the model it was made for."""
TINY_SHARD = 2**20
"""Parameters on a device below which a mesh shards the model more than it needs to."""


class Plan(Frozen):
    """How a model is trained on these devices.

    Attributes:
        mesh: axis sizes larger than 1, outermost first; empty on one device.
        batch: samples per step, per device and per microbatch.
        sharding: what is sharded, how long gathered weights live, rules, remat.
        schedule: pipeline schedule; null without a pipe axis.
        num_microbatches: microbatches between two flushes of the pipeline; 1 without a pipe axis.
        num_chunks: pieces of the model on each pipeline stage.
        precision: compute format: no (float32), bf16 or fp16.
        matmul: precision of float32 matrix products.
        kernels: what computes known parts of the model, such as attention.
    """

    mesh: dict[str, int]
    batch: Batch
    sharding: ShardingConfig = ShardingConfig()
    schedule: str | None = None
    num_microbatches: int = Field(default=1, ge=1)
    num_chunks: int = Field(default=1, ge=1)
    precision: Precision = "no"
    matmul: str = "default"
    kernels: KernelChoice = "auto"

    @field_validator("mesh")
    @classmethod
    def _resolved(cls, mesh: dict[str, int]) -> dict[str, int]:
        if INFER in mesh.values():
            raise ValueError("a plan has no inferred sizes; write a number instead of -1")
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
        if self.size("pipe") > 1:
            self._check_pipeline()
        every = self.batch.sync_gradients_every
        check_context(self.size(CONTEXT), stages=self.size(PIPE), sync_gradients_every=every)
        return self

    def _check_pipeline(self) -> None:
        steps, count = self.batch.gradient_accumulation_steps, self.num_microbatches
        if self.schedule is None:
            raise UserError(
                "the plan has pipeline stages and no schedule",
                why=f"pipe={self.size('pipe')}",
                fix="write schedule: 1f1b",
            )
        stages = self.size("pipe")
        check_sync(self.batch.sync_gradients_every, steps, stages)
        # With chunks, microbatches run in groups of one per stage.
        group = stages if self.num_chunks > 1 else 1
        if steps % count:
            choices = nearest_microbatches(steps, count, group)
            raise UserError(
                f"{count} microbatches at a time do not divide the {steps} of a step",
                why=f"{Setting('pipeline.num_microbatches', count)}, "
                f"{Setting('training.gradient_accumulation_steps', steps)}",
                fix=f"write {Setting('pipeline.num_microbatches', *choices)}, or leave one of the "
                "two out"
                if choices
                else f"leave {Setting('training.gradient_accumulation_steps')} out",
            )
        if count % group:
            choices = nearest_microbatches(steps, count, group)
            raise UserError(
                f"{counted(count, 'microbatch', 'microbatches')} cannot be divided into groups "
                f"of {stages}, one per stage",
                why=f"num_microbatches {count} is not a multiple of {stages}, which num_chunks "
                f"{self.num_chunks} needs",
                fix=(f"write num_microbatches: {either(choices)}, or " if choices else "write ")
                + "schedule: 1f1b and num_chunks: 1",
            )

    @property
    def num_devices(self) -> int:
        """Devices the plan is for."""
        return math.prod(self.mesh.values())

    def size(self, axis: str) -> int:
        """Return the size of an axis; axes that are not in the mesh have size 1."""
        return self.mesh.get(axis, 1)

    @property
    def gathers_twice(self) -> bool:
        """Whether the weights of a block are gathered for each of its passes."""
        sharding = self.sharding
        return self.size("fsdp") > 1 and sharding.zero == 3 and not sharding.keep_gathered

    def __str__(self) -> str:
        return self.describe()

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
            chunks = f" and {self.num_chunks} chunks a stage" if self.num_chunks > 1 else ""
            count = counted(self.num_microbatches, "microbatch", "microbatches")
            parts.append(f"{self.schedule} with {count}{chunks}")
        return ", ".join(parts)

    def to_yaml(self) -> str:
        """Return the plan as YAML; `from_yaml` gives an equal plan back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read a plan written by `to_yaml`."""
        check_kind("text", text, str, "write the text that `to_yaml` returned")
        try:
            values: Any = read_yaml(text)
        except (yaml.YAMLError, ValueError) as error:
            raise UserError("the plan is not valid YAML", why=yaml_line(error)) from None
        if not isinstance(values, dict):
            raise UserError("the plan is empty or not a mapping")
        settings = {str(key): value for key, value in values.items() if key != MADE_FOR}
        check_file_batch(settings, cls._is_valid)
        return cls.parse(settings, prefix="plan")

    @classmethod
    def _is_valid(cls, values: dict[str, Any]) -> bool:
        try:
            _ = cls.parse(values)
        except UserError:
            return False
        return True


def check_context(size: int, *, stages: int, sync_gradients_every: int) -> None:
    """Refuse what cannot be combined with rows that are divided."""
    if size == 1 or stages == sync_gradients_every == 1:
        return
    other = Setting("mesh.pipe", stages)
    why = "stages do different work at the same time and cannot wait for other stages' rows"
    if stages == 1:
        other = Setting("training.sync_gradients_every", sync_gradients_every)
        why = "devices that accumulate gradients of their own samples need whole rows"
    raise UserError(
        f"{Setting('mesh.context', size)} cannot be combined with {other}",
        why=why,
        fix=f"leave one of the two out; {Setting('mesh.fsdp')} and {Setting('mesh.tensor')} "
        f"can be combined with {Setting('mesh.context')}",
    )


def make_plan(config: Config, num_devices: int) -> Plan:
    """Return the plan a config describes for this number of devices."""
    blocks = config.model.arguments().get("num_blocks")
    try:
        sizes = resolve_mesh(
            mesh_sizes(config), num_devices, num_blocks=blocks if isinstance(blocks, int) else None
        )
    except UserError as error:
        if config.plan is None:
            raise
        raise UserError(
            error.what,
            why=error.why,
            fix=f"the mesh is that of {Setting('plan', config.plan)}: train on as many devices as "
            f"it was made for, or plan again for {num_devices}",
        ) from None
    training = config.training
    return plan_on(
        sizes,
        config.pipeline,
        solve_pipeline_batch(
            config.pipeline,
            sizes,
            global_batch_size=training.global_batch_size,
            micro_batch_size=_known_size(training.micro_batch_size),
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            sync_gradients_every=training.sync_gradients_every,
        ),
        sharding=config.sharding,
        precision=precision(config),
        matmul=config.precision.matmul,
        kernels=config.kernels,
    )


def _known_size(micro_batch_size: int | str | None) -> int | None:
    if isinstance(micro_batch_size, str):
        raise UserError(
            f"{Setting('training.micro_batch_size', micro_batch_size)} has to be chosen first",
            fix=f"write a number, or {Setting('mesh', 'auto')} and leave it out",
        )
    return micro_batch_size


def resolve_mesh(
    sizes: Mapping[str, int], num_devices: int, *, num_blocks: int | None = None
) -> dict[str, int]:
    """Return sizes whose product is ``num_devices``; one of those requested may be -1.

    The error suggests meshes that work. Pipeline stages divide the repeated blocks, if their number
    is known.
    """
    asked = canonical_sizes(sizes)
    try:
        return resolve_sizes(asked, num_devices)
    except UserError as error:
        if list(asked.values()).count(INFER) > 1:
            raise
        fix = _other_meshes(asked, num_devices, num_blocks)
        raise UserError(error.what, why=error.why, fix=fix) from None


def _other_meshes(asked: Mapping[str, int], num_devices: int, num_blocks: int | None) -> str:
    def has_blocks(sizes: Mapping[str, int]) -> bool:
        return num_blocks is None or num_blocks % abs(sizes.get("pipe", 1)) == 0

    fitting = filter(has_blocks, nearest_sizes(asked, num_devices, most=32))
    shown = list(dict.fromkeys(mesh_setting(sizes) for sizes in fitting))[:3]
    product = math.prod(size for size in asked.values() if size != INFER)
    text = "nearest meshes that work: " + "; ".join(shown)
    if product > num_devices and has_blocks(asked):
        simulate = Setting("simulate", product)
        text += f"\nor {simulate}, to try this mesh on {product} virtual CPU devices"
    return text


def unused_settings(config: Config, plan: Plan) -> list[str]:
    """Return a sentence for each explicit setting that has no effect on a run."""
    unused = unused_pipeline(config.pipeline, plan)
    if config.hardware is not None:
        unused.append(
            f"hardware={config.hardware} has no effect here: a run uses the devices that are "
            "present; it is for `meshwright plan` and `meshwright rehearse`"
        )
    return unused


def unused_pipeline(pipeline: PipelineConfig, plan: Plan) -> list[str]:
    """Return a sentence for the pipeline's settings that have no effect."""
    explicit = pipeline.model_dump(exclude_defaults=True)
    if plan.size("pipe") == 1 and explicit:
        text = " ".join(str(Setting(f"pipeline.{key}", value)) for key, value in explicit.items())
        return [f"{text} has no effect: the mesh {describe_sizes(plan.mesh)} has no pipe axis"]
    if plan.size("pipe") > 1 and "num_chunks" in explicit and pipeline.schedule != "interleaved":
        return [
            f"{Setting('pipeline.num_chunks', pipeline.num_chunks)} has no effect with "
            f"{Setting('pipeline.schedule', pipeline.schedule)}; chunks need "
            f"{Setting('pipeline.schedule', 'interleaved')}"
        ]
    return []


def mesh_sizes(config: Config) -> dict[str, int]:
    """Return the requested mesh, from ``mesh`` or ``model.mesh_shape``; one size may be -1."""
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
    from_model = canonical_sizes(dict(zip(names, shape, strict=True)))
    full = {axis: from_model.get(axis, 1) for axis in asked}
    explicit = config.mesh.model_fields_set
    differing = [a for a in full if a in explicit and asked[a] not in (full[a], INFER)]
    if differing:
        raise UserError(
            "model.mesh_shape and mesh contradict each other",
            why="; ".join(
                f"{axis} is {full[axis]} by model.mesh_shape and {asked[axis]} by mesh.{axis}"
                for axis in differing
            ),
            fix="write only one of the two",
        )
    return full


def precision(config: Config) -> Precision:
    """Return the compute format, from ``precision`` or ``training.mixed_precision``."""
    mixed, compute = config.training.mixed_precision, config.precision.compute
    if mixed and compute and mixed != compute:
        raise UserError(
            "training.mixed_precision and precision contradict each other",
            why=f"training.mixed_precision={mixed}, precision.compute={compute}",
            fix="write only one of the two",
        )
    return mixed or compute or "no"


def plan_on(
    sizes: Mapping[str, int], pipeline: PipelineConfig, batch: Batch, **others: Any
) -> Plan:
    """Return the plan for a mesh of these sizes; ``others`` are further fields of the plan."""
    if sizes.get("pipe", 1) > 1:
        others["schedule"] = pipeline.schedule
        others["num_microbatches"] = pipeline.num_microbatches or batch.gradient_accumulation_steps
        others["num_chunks"] = pipeline.num_chunks if pipeline.schedule == "interleaved" else 1
    return Plan(mesh=shown_sizes(sizes), batch=batch, **others)
