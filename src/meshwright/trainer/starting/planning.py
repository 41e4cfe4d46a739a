"""The plan of a trainer: what its settings say, or what the planner chooses."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import processes
from meshwright.config.microbatches import solve_pipeline_batch
from meshwright.config.schema import PipelineConfig, Precision, ShardingConfig
from meshwright.data.batches import form_of
from meshwright.errors import UserError
from meshwright.generation.model_facts import cache_shapes, position_limit
from meshwright.generation.text_settings import HALF
from meshwright.generation.token_decoder import split_model
from meshwright.hardware import Hardware
from meshwright.inputs.checks import mesh_sizes
from meshwright.inputs.user_model import model_source
from meshwright.plan import Plan, plan_on, resolve_mesh
from meshwright.planner.devices.links import check_network
from meshwright.planner.devices.local_hardware import find_hardware, hardware_of
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.rollout_needs import RolloutNeeds
from meshwright.planner.guidance.plan_report import AUTO, PlanReport, choose_plan, make_report
from meshwright.planner.guidance.plan_text import report_text
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.program.trace.build_model import ModelSource, abstract_model
from meshwright.recipe import Recipe
from meshwright.tasks.grpo import GRPO
from meshwright.text.columns import as_text
from meshwright.trainer.starting.fewer_processes import plan_for_remaining
from meshwright.trainer.trainer_settings import TrainerSettings, read_pipeline
from meshwright.trees import Batch


@dataclass(frozen=True)
class PlannedTraining:
    """The best plan for a model on some hardware; as text, what `meshwright plan` prints.

    Attributes:
        report: all that is known about it and about other plans.
    """

    report: PlanReport

    @property
    def plan(self) -> Plan:
        """The plan: what `meshwright.Trainer` takes as its mesh."""
        return self.report.best.plan

    @property
    def estimate(self) -> Estimate:
        """Its time per step and its memory per device."""
        return self.report.best

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that ``meshwright train plan=FILE`` reads."""
        Path(path).write_text(self.report.to_yaml(), encoding="utf-8")

    def __str__(self) -> str:
        """Return the report for reading."""
        return as_text(report_text(self.report))


def trainer_plan(settings: TrainerSettings, num_samples: int) -> Plan:
    """Return the plan that a trainer's settings describe for batches of this many samples."""
    devices = settings.devices
    return plan_for_remaining(
        partial(_plan_for_all, settings, num_samples),
        len(devices) if devices is not None else jax.device_count(),
        keep_micro=settings.defaults.keep_micro,
    )


def automatic_plan(settings: TrainerSettings, batch: Batch) -> Plan:
    """Return the plan that is estimated to be fastest, and print it with the reason.

    Settings of the trainer that are not the default stay as they are.
    """
    task = _task(settings, _present(settings), form_of(batch).num_samples)
    plan, line = choose_plan(estimator_for(settings, batch), task, f'mesh="{AUTO}"')
    # Every process finds a plan; that of the first one counts.
    text = processes.broadcast(plan.to_yaml())
    if jax.process_index() == 0:
        print(line, file=sys.stderr)
    return Plan.from_yaml(text)


def plan_elsewhere(
    settings: TrainerSettings, batch: Batch, hardware: str | None
) -> PlannedTraining:
    """Return the best plan for a trainer's model; settings other than the default stay."""
    estimator = estimator_for(settings, batch)
    devices = _present(settings) if hardware is None else find_hardware(hardware)
    check_network(devices)
    name = getattr(settings.model, "__name__", type(settings.model).__name__)
    name = "the model" if name == "<lambda>" else name
    task = _task(settings, devices, form_of(batch).num_samples)
    return PlannedTraining(make_report(estimator, task, name=name))


def data_missing(hardware: str | None) -> UserError:
    """Return the error for a plan that is asked for without data."""
    given = "" if hardware is None else f', hardware="{hardware}"'
    return UserError(
        "plan needs data",
        why="a plan depends on the shapes of a batch, and a trainer keeps the batch size of the "
        "last fit, but not its data",
        fix=f"write trainer.plan(data{given}) with the data that fit takes",
    )


def estimator_for(settings: TrainerSettings, batch: Batch) -> Estimator:
    """Return what estimates plans for a trainer's model."""
    planned = settings.mesh if isinstance(settings.mesh, Plan) else settings
    model = model_source(settings.model, settings.loss, lambda: batch)
    return estimator_of(settings, model, batch, planned.precision)


def estimator_of(
    trained: TrainerSettings | Recipe, model: ModelSource, batch: Batch, precision: Precision
) -> Estimator:
    """Return what estimates plans for a model, with what a trainer or recipe says of training."""
    return Estimator(
        model,
        trained.loss,
        trained.whole_optimizer,
        batch,
        trainable=trained.trained,
        precision=precision,
        rollout=rollout_needs(trained.task, model, precision),
    )


def _plan_for_all(settings: TrainerSettings, num_samples: int, num_devices: int) -> Plan:
    """Return the plan for this many devices, with no process missing."""
    if isinstance(settings.mesh, Plan):
        _check_given(settings, settings.mesh, num_samples)
        return settings.mesh
    sizes = resolve_mesh(mesh_sizes(settings.mesh), num_devices)
    steps, pipeline = settings.gradient_accumulation_steps, read_pipeline(settings.pipeline)
    batch = solve_pipeline_batch(
        pipeline,
        sizes,
        global_batch_size=num_samples,
        gradient_accumulation_steps=None if steps == 1 else steps,
        sync_gradients_every=settings.sync_gradients_every,
    )
    return plan_on(
        sizes,
        pipeline,
        batch,
        sharding=settings.sharding,
        precision=settings.precision,
        kernels=settings.kernels,
    )


def _check_given(settings: TrainerSettings, plan: Plan, num_samples: int) -> None:
    """Raise if settings or batches are not those of a plan that is given as the mesh."""
    batch = plan.batch
    beside: dict[str, tuple[Any, Any, Any]] = {
        "precision": (settings.precision, "no", plan.precision),
        "kernels": (settings.kernels, "auto", plan.kernels),
        "sharding": (settings.sharding, ShardingConfig(), plan.sharding),
        "pipeline": (read_pipeline(settings.pipeline), PipelineConfig(), PipelineConfig()),
        **{
            name: (getattr(settings, name), 1, getattr(batch, name))
            for name in ("gradient_accumulation_steps", "sync_gradients_every")
        },
    }
    for name, (given, default, planned) in beside.items():
        if given not in (default, planned):
            raise UserError(
                f"{name} differs from the plan that is given as the mesh",
                why=f"the trainer has {given}, the plan {planned}",
                fix=f"leave {name} out, or change it in the plan",
            )
    if num_samples != batch.global_batch_size:
        raise UserError(
            f"the batches have {num_samples} samples, and the plan is for "
            f"{batch.global_batch_size}",
            fix=f"give batches of {batch.global_batch_size}, or make a plan for {num_samples}",
        )


def _task(settings: TrainerSettings, hardware: Hardware, num_samples: int) -> PlanTask:
    return PlanTask(
        hardware=hardware,
        global_batch_size=num_samples,
        fixed=_fixed(settings),
        sharding=settings.sharding,
        precision=settings.precision,
        kernels=settings.kernels,
    )


def _present(settings: TrainerSettings) -> Hardware:
    return hardware_of(settings.devices if settings.devices is not None else jax.devices())


def _fixed(settings: TrainerSettings) -> FixedSettings:
    """Return the settings that are not the defaults, which the planner does not change."""
    sharding, pipeline = settings.sharding, read_pipeline(settings.pipeline)
    steps, sync = settings.gradient_accumulation_steps, settings.sync_gradients_every
    explicit = sharding.model_fields_set
    given = pipeline.model_fields_set
    return FixedSettings(
        remat=sharding.remat if "remat" in explicit else None,
        blocks=sharding.blocks if "blocks" in explicit else None,
        gradient_accumulation_steps=None if steps == 1 else steps,
        sync_gradients_every=None if sync == 1 else sync,
        schedule=pipeline.schedule if "schedule" in given else None,
        num_microbatches=pipeline.num_microbatches,
        num_chunks=pipeline.num_chunks if "num_chunks" in given else None,
    )


def check_context(task: GRPO, model: ModelSource) -> None:
    """Refuse a model that takes fewer tokens than prompts and completions have, if it tells."""
    if task.context_length is not None:
        return
    split, length = split_model(abstract_model(model)), task.most_tokens
    most, why = split.structure.context, "its attribute context_length says so"
    if most >= length:
        most, why = position_limit(split, length)
    if most < length:
        raise task.too_long(f"it takes {most:,} tokens: {why}" if most else why)


def rollout_needs(task: Any, model: ModelSource, precision: str) -> RolloutNeeds | None:
    """Return what the rollouts of a task need; None if it has none."""
    if not isinstance(task, GRPO):
        return None
    logits, cache = cache_shapes(
        abstract_model(model), task.max_prompt_length, task.most_tokens, HALF.get(precision)
    )
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    # Drawing keeps the logits in float32, with their order and the random numbers beside them.
    sizes.append(3 * logits.size * jnp.dtype(jnp.float32).itemsize)
    return RolloutNeeds(sum(sizes), task.generation_batch_size, task.needs_reference)
