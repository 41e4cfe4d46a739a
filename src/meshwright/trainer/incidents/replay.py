"""Replaying a step that was not finite, to find the module and the samples responsible."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.checkpoint.export import read_groups
from meshwright.config.lora_section import LoRA
from meshwright.config.schema import Config
from meshwright.errors import UserError
from meshwright.inputs.user_model import UserModel
from meshwright.mesh.build import Device
from meshwright.plan import Plan
from meshwright.program.trace.traced_loss import Loss
from meshwright.recipe import make_recipe
from meshwright.step.state import LossScale
from meshwright.tasks.grpo import GRPO
from meshwright.trainer.incidents.flight_record import FlightRecord, read_record
from meshwright.trainer.incidents.not_finite import count_wrong
from meshwright.trainer.incidents.replay_text import BadArray, Replay
from meshwright.trainer.incidents.responsible import find_responsible, first_origin
from meshwright.trainer.trained.load_model import read_leaves
from meshwright.trainer.trainer import Trainer


def replay(
    record: str | Path,
    *,
    model: UserModel | None = None,
    loss: Loss | None = None,
    task: GRPO | None = None,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float | None = None,
    trainable: Filter = nnx.Param,
    lora: LoRA | None = None,
    devices: Sequence[Device] | None = None,
) -> Replay:
    """Rerun a recorded step, and find where it stops being finite.

    Args:
        record: the folder of the record, such as ``runs/first/incidents/000123``.
        model: the model of the run, or what builds it; not needed for a run from the command line.
        loss: the loss of the run; like the model.
        task: the task of a run that learned from rewards, instead of a loss.
        optimizer: its optimizer, needed to compile exactly the same program; without it, the last
            bits of a finite loss may differ.
        clip_norm: its ``clip_norm``, for the same reason.
        trainable: NNX filter of what is trained, or path patterns.
        lora: the adapters of the run.
        devices: the devices to run on; all by default. With fewer than the run had, one is used.
    """
    read = read_record(record)
    plan, chosen = _fitting(read.plan, list(devices or jax.devices()))
    own = _parts(read, model, loss if task is None else task.loss, optimizer, clip_norm)
    parts: dict[str, Any] = {"trainable": trainable, "lora": lora, **own}
    trainer = Trainer(**parts, mesh=plan, devices=chosen)
    assembled = trainer.assemble(read.batch)
    values = read_leaves(read.checkpoints, read.step - 1, assembled.model_leaves.leaves)
    scale = _scale(read)
    state = assembled.start(values)
    if scale is not None:
        state = replace(state, loss_scale=LossScale(*map(jnp.asarray, scale)))
    compiled: Callable[..., Any] = assembled.step
    metrics = jax.device_get(compiled(state, assembled.put_batch(read.batch))[1])
    with jax.default_device(chosen[0]):
        origin = first_origin(trainer.loss, assembled, values, read, scale)
        responsible = find_responsible(trainer.loss, assembled, values, read, scale)
    exact = plan == read.plan
    return Replay(
        folder=read.folder,
        step=read.step,
        batch=read.facts["batch"],
        loss=(read.facts["loss"], str(float(metrics["loss"]))),
        grad_norm=(read.facts["grad_norm"], str(float(metrics["grad_norm"]))),
        same_bits=np.asarray(metrics["loss"]).tobytes().hex() == read.facts["loss_bytes"],
        reproduced=not all(np.isfinite(metrics[name]) for name in ("loss", "grad_norm")),
        where=plan.describe() if exact else "one device instead of " + read.plan.describe(),
        bad_arrays=tuple(_bad_arrays(read)),
        indices=tuple(assembled.traced.wrong_indices(read.leaves, negative=True)),
        origin=origin,
        responsible=responsible,
        numbered=read.facts["samples"] is not None,
    )


def _parts(
    read: FlightRecord,
    model: UserModel | None,
    loss: Loss | None,
    optimizer: optax.GradientTransformation | None,
    clip_norm: float | None,
) -> dict[str, Any]:
    """Return what the trainer of a recorded step is made of."""
    config = read.facts["config"]
    if config and model is None and loss is None:
        parsed = Config.parse(dict(config))
        recipe = make_recipe(parsed, read.plan.batch.global_batch_size)
        names = ("model", "loss", "optimizer", "clip_norm")
        trained = {"trainable": parsed.training.trainable or nnx.Param, "lora": parsed.lora}
        return {name: getattr(recipe, name) for name in names} | trained
    if model is None or loss is None:
        missing = "model and loss" if model is None and loss is None else "one of the two"
        raise UserError(
            f"how to build the model of {read.folder} is not known",
            why="the run was started from Python, which saves no config"
            if not config
            else f"{missing} was not given",
            fix=f'pass both: mw.replay("{read.folder}", model=Net, loss=loss)'
            " (or task= instead of loss=)",
        )
    optimizer = optax.sgd(0.0) if optimizer is None else optimizer
    return {"model": model, "loss": loss, "optimizer": optimizer, "clip_norm": clip_norm}


def _fitting(plan: Plan, devices: list[Device]) -> tuple[Plan, list[Device]]:
    """Return the plan of the run if there are enough devices, or one for a single device."""
    if plan.num_devices <= len(devices):
        return plan, devices[: plan.num_devices]
    size = plan.batch.global_batch_size // plan.batch.gradient_accumulation_steps
    batch = plan.batch.model_copy(
        update={"micro_batch_size": size, "replicas": 1, "sync_gradients_every": 1}
    )
    alone = {"mesh": {}, "batch": batch, "schedule": None, "num_microbatches": 1, "num_chunks": 1}
    return plan.model_copy(update=alone), devices[:1]


def _scale(read: FlightRecord) -> tuple[Any, Any, Any] | None:
    if read.plan.precision != "fp16":
        return None
    counters = read_groups(read.checkpoints, ("counters",), step=read.step - 1)["counters"]
    return counters["scale"], counters["good_steps"], counters["skipped"]


def _bad_arrays(read: FlightRecord) -> list[BadArray]:
    found: list[BadArray] = []
    for name, leaf in zip(read.names, read.leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        bad = ~np.isfinite(leaf.astype(np.float32)).reshape(len(leaf), -1).all(1)
        if bad.any():
            samples = tuple(read.sample(int(row)) for row in np.flatnonzero(bad))
            found.append(BadArray(name, *count_wrong(leaf), samples))
    return found
