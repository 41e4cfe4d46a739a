"""What the planner chooses for a trainer: for its devices, or for others."""

from __future__ import annotations

import sys

import jax
import optax
from flax.nnx.filterlib import Filter

from meshwright import processes
from meshwright.hardware import Hardware
from meshwright.plan import Plan
from meshwright.planner.devices.links import check_network
from meshwright.planner.devices.local_hardware import find_hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.guidance.auto_plan import AUTO, choose_plan, hardware_of
from meshwright.planner.guidance.plan_report import make_report
from meshwright.planner.search.candidates import Pins, PlanTask
from meshwright.program.trace.build_model import ModelSource
from meshwright.program.trace.traced_loss import Loss
from meshwright.trainer.starting.fit_arguments import read_pipeline
from meshwright.trainer.starting.plan_settings import PlanSettings
from meshwright.trainer.starting.planned_training import PlannedTraining
from meshwright.trees import Batch


def automatic_plan(
    settings: PlanSettings,
    model: ModelSource,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    trainable: Filter,
    batch: Batch,
    num_samples: int,
) -> Plan:
    """Return the plan that is estimated to be fastest, and print it with the reason.

    Args:
        settings: the settings of the trainer; what is not the default stays as it is.
        model: builds the model.
        loss: the loss.
        optimizer: the optimizer.
        trainable: NNX filter of what is trained.
        batch: a global batch.
        num_samples: its samples.
    """
    estimator = Estimator(
        model, loss, optimizer, batch, trainable=trainable, precision=settings.precision
    )
    task = _task(settings, _present(settings), num_samples)
    chosen = choose_plan(estimator, task, f'mesh="{AUTO}"')
    # Every process finds a plan; that of the first one counts.
    text = processes.broadcast(chosen.plan.to_yaml())
    if jax.process_index() == 0:
        print(chosen.line, file=sys.stderr)
    return Plan.from_yaml(text)


def plan_for(
    settings: PlanSettings,
    estimator: Estimator,
    num_samples: int,
    *,
    name: str,
    hardware: str | None,
) -> PlannedTraining:
    """Return the best plan for a trainer's model, and what is known about it.

    Args:
        settings: the settings of the trainer; what is not the default stays as it is.
        estimator: estimates plans for the model.
        num_samples: samples of a global batch.
        name: the model.
        hardware: such as ``8xH100``; None for the trainer's devices.
    """
    devices = _present(settings) if hardware is None else find_hardware(hardware)
    check_network(devices)
    return PlannedTraining(make_report(estimator, _task(settings, devices, num_samples), name=name))


def _task(settings: PlanSettings, hardware: Hardware, num_samples: int) -> PlanTask:
    return PlanTask(
        hardware=hardware,
        global_batch_size=num_samples,
        pins=_pins(settings),
        sharding=settings.sharding,
        precision=settings.precision,
        kernels=settings.kernels,
    )


def _present(settings: PlanSettings) -> Hardware:
    return hardware_of(settings.devices if settings.devices is not None else jax.devices())


def _pins(settings: PlanSettings) -> Pins:
    """Return the settings that are not the defaults, which the planner does not change."""
    sharding, pipeline = settings.sharding, read_pipeline(settings.pipeline)
    steps, sync = settings.gradient_accumulation_steps, settings.sync_gradients_every
    explicit = sharding.model_fields_set
    given = pipeline.model_fields_set
    return Pins(
        remat=sharding.remat if "remat" in explicit else None,
        blocks=sharding.blocks if "blocks" in explicit else None,
        gradient_accumulation_steps=None if steps == 1 else steps,
        sync_gradients_every=None if sync == 1 else sync,
        schedule=pipeline.schedule if "schedule" in given else None,
        num_microbatches=pipeline.num_microbatches,
        num_chunks=pipeline.num_chunks if "num_chunks" in given else None,
    )
