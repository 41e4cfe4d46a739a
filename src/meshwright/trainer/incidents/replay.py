"""Replaying an update that was not finite: the same value again, its module and its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.checkpoint.export import read_groups
from meshwright.config.argument_checks import check_clip_norm, check_optimizer
from meshwright.config.schema import Config
from meshwright.errors import UserError
from meshwright.inputs.checks import check_loss, check_trainable
from meshwright.inputs.user_model import UserModel, model_source
from meshwright.mesh.build import Device
from meshwright.plan import Plan
from meshwright.program.evaluate.nonfinite_origin import Origin
from meshwright.program.trace.build_model import ModelSource
from meshwright.program.trace.traced_loss import Loss
from meshwright.recipe import make_recipe
from meshwright.step.assemble import Assembled, assemble
from meshwright.step.state import LossScale, TrainState
from meshwright.trainer.incidents.read_record import FlightRecord, read_record
from meshwright.trainer.incidents.replay_text import describe_replay, replay_json
from meshwright.trainer.incidents.responsible import Responsible, find_responsible, first_origin
from meshwright.trainer.trained.load_model import read_leaves


@dataclass(frozen=True)
class BadArray:
    """An array of the batch that is not finite.

    Attributes:
        name: its name.
        nans: how many elements are NaN.
        infs: how many elements are infinite.
        samples: the numbers of the samples that have them.
    """

    name: str
    nans: int
    infs: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """What became of an update that was run again.

    Attributes:
        folder: the folder of the record.
        update: the update, from 1.
        batch: the number of its batch, from 0.
        loss: the loss that was recorded, and the one of now.
        grad_norm: the gradient norm that was recorded, and the one of now.
        same_bits: whether the loss is the same bit for bit.
        reproduced: whether it is not finite again.
        where: what it ran on.
        bad_arrays: the arrays of the batch that are not finite.
        origin: where values stop being finite; None if no single equation could be found.
        responsible: the samples that it comes from.
        numbered: whether samples are numbered as the data have them, or by their row in the batch.
    """

    folder: Path
    update: int
    batch: int
    loss: tuple[str, str]
    grad_norm: tuple[str, str]
    same_bits: bool
    reproduced: bool
    where: str
    bad_arrays: tuple[BadArray, ...]
    origin: Origin | None
    responsible: Responsible | None
    numbered: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return replay_json(self)

    def __str__(self) -> str:
        return describe_replay(self)


@dataclass(frozen=True)
class _Parts:
    """What an update is made of."""

    model: ModelSource
    loss: Loss
    optimizer: optax.GradientTransformation
    clip_norm: float | None
    trainable: Filter = nnx.Param


def replay(
    record: str | Path,
    *,
    model: UserModel | None = None,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float | None = None,
    trainable: Filter = nnx.Param,
    devices: Sequence[Device] | None = None,
) -> Replay:
    """Run a recorded update again, and find where it stops being finite.

    Args:
        record: the folder of the record, such as ``runs/first/incidents/000123``.
        model: the model of the run, or what builds it; not needed for a run from the command line.
        loss: the loss of the run; like the model.
        optimizer: its optimizer, with which the very same program is compiled; without it, the
            last bits of a finite loss may differ.
        clip_norm: its ``clip_norm``, for the same reason.
        trainable: NNX filter of what is trained.
        devices: the devices to run on; all by default. With fewer than the run had, one is used.
    """
    read = read_record(record)
    parts = _parts(read, model, loss, optimizer, clip_norm, trainable)
    plan, chosen = _fitting(read.plan, list(devices or jax.devices()))
    assembled = assemble(
        parts.model,
        parts.loss,
        parts.optimizer,
        plan,
        read.batch,
        clip_norm=parts.clip_norm,
        trainable=parts.trainable,
        devices=chosen,
        guarded=True,
    )
    values = read_leaves(read.checkpoints, read.update - 1, assembled.model_leaves.leaves)
    scale = _scale(read)
    state = assembled.start(values)
    if scale is not None:
        state = replace(state, loss_scale=LossScale(*map(jnp.asarray, scale)))
    metrics = _run(assembled, state, read)
    with jax.default_device(chosen[0]):
        origin = first_origin(parts.loss, assembled, values, read, scale)
        responsible = find_responsible(parts.loss, assembled, values, read, scale)
    exact = plan == read.plan
    return Replay(
        folder=read.folder,
        update=read.update,
        batch=read.facts["batch"],
        loss=(read.facts["loss"], str(float(metrics["loss"]))),
        grad_norm=(read.facts["grad_norm"], str(float(metrics["grad_norm"]))),
        same_bits=np.asarray(metrics["loss"]).tobytes().hex() == read.facts["loss_bytes"],
        reproduced=not all(np.isfinite(metrics[name]) for name in ("loss", "grad_norm")),
        where=plan.describe() if exact else "one device instead of " + read.plan.describe(),
        bad_arrays=tuple(_bad_arrays(read)),
        origin=origin,
        responsible=responsible,
        numbered=read.facts["samples"] is not None,
    )


def _run(assembled: Assembled, state: TrainState, read: FlightRecord) -> dict[str, Any]:
    batch = assembled.put_batch(read.batch)
    compiled: Callable[..., Any] = assembled.step
    return jax.device_get(compiled(state, batch)[1])


def _parts(
    read: FlightRecord,
    model: UserModel | None,
    loss: Loss | None,
    optimizer: optax.GradientTransformation | None,
    clip_norm: float | None,
    trainable: Filter,
) -> _Parts:
    config = read.facts["config"]
    if config and model is None and loss is None:
        recipe = make_recipe(Config.parse(dict(config)), read.plan.batch.global_batch_size)
        return _Parts(recipe.model, recipe.loss, recipe.optimizer, recipe.clip_norm)
    if model is None or loss is None:
        missing = "model and loss" if model is None and loss is None else "one of the two"
        raise UserError(
            f"how to build the model of {read.folder} is not known",
            why="the run was started from Python, which saves no config"
            if not config
            else f"{missing} was not given",
            fix=f'pass both: mw.replay("{read.folder}", model=Net, loss=loss)',
        )
    check_loss(loss)
    check_trainable(trainable)
    check_clip_norm(clip_norm)
    if optimizer is not None:
        check_optimizer(optimizer)
    batch = read.batch
    return _Parts(
        model_source(model, loss, lambda: batch),
        loss,
        optimizer or optax.sgd(0.0),
        clip_norm,
        trainable,
    )


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
    counters = read_groups(read.checkpoints, ("counters",), update=read.update - 1)["counters"]
    return counters["scale"], counters["good_steps"], counters["skipped"]


def _bad_arrays(read: FlightRecord) -> list[BadArray]:
    found: list[BadArray] = []
    for name, leaf in zip(read.names, read.leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        values = leaf.astype(np.float32)
        bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
        if bad.any():
            samples = tuple(read.sample(int(row)) for row in np.flatnonzero(bad))
            nans, infs = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            found.append(BadArray(name, nans, infs, samples))
    return found
