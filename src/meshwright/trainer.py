"""The trainer: a model, a loss, an optimizer and a mesh in; a trained model out."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.data.batches import form_of, read_batch, read_batches
from meshwright.errors import UserError
from meshwright.inputs.checks import (
    asked_sizes,
    check_clip_norm,
    check_count,
    check_loss,
    check_optimizer,
    check_precision,
)
from meshwright.inputs.model import exists, model_source
from meshwright.mesh.axes import resolve_sizes, shown_sizes
from meshwright.plan import Plan, check_supported
from meshwright.program.trace import Loss
from meshwright.step.assemble import Assembled, assemble
from meshwright.step.state import TrainState
from meshwright.verify import Certificate, verify

Metrics = dict[str, float]
OnMetrics = Callable[[int, Metrics], None]


@dataclass(frozen=True)
class FitResult:
    """What a training run gave.

    Attributes:
        losses: the mean loss of every logged update, by update.
        updates: how many were done; fewer than asked for if the batches ran out.
        seconds: time spent, compilation included.
        state: the state at the end.
        assembled: the step and what it was made from.
    """

    losses: dict[int, float]
    updates: int
    seconds: float
    state: TrainState
    assembled: Assembled

    @property
    def model(self) -> Any:
        """The trained model, as the user wrote it."""
        return self.assembled.model(self.state)


@dataclass(kw_only=True)
class Trainer:
    """Trains a Flax NNX model on any mesh of devices.

    Attributes:
        model: builds the model, from `nnx.Rngs` if it takes them; or a model that exists already;
            or a Linen module.
        loss: ``loss(model, batch)``: a scalar mean, or `Weighted(total, weight)`; optionally with
            a dict of metrics.
        optimizer: any optax transformation.
        mesh: ``"fsdp=4,tensor=2"``, a mapping of axis sizes, or a whole `Plan`; ``"auto"`` and an
            empty text put all devices on ``data``.
        precision: no (float32), bf16 or fp16.
        gradient_accumulation_steps: microbatches per update.
        sync_gradients_every: microbatches between two gradient reductions.
        clip_norm: largest global gradient norm.
        sharding: what is divided and how; see `ShardingConfig`.
        trainable: NNX filter for what is trained.
        seed: of initialization and dropout.
        log_every: updates between two looks at the metrics.
        devices: where to train; all devices by default.
    """

    model: Any
    loss: Loss
    optimizer: optax.GradientTransformation
    mesh: str | Mapping[str, int] | Plan = "auto"
    precision: Precision = "no"
    gradient_accumulation_steps: int = 1
    sync_gradients_every: int = 1
    clip_norm: float | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    trainable: Any = nnx.Param
    seed: int = 0
    log_every: int = 10
    devices: list[Any] | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_optimizer(self.optimizer)
        check_precision(self.precision)
        check_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_count("sync_gradients_every", self.sync_gradients_every)
        check_count("log_every", self.log_every)
        check_clip_norm(self.clip_norm)

    def fit(
        self,
        batches: Iterable[Any],
        *,
        steps: int,
        on_metrics: OnMetrics | None = None,
        assembled: Assembled | None = None,
    ) -> FitResult:
        """Train for ``steps`` updates on host batches of the whole global batch.

        If the batches run out before that, training stops there with a warning, and the result
        says how many updates were done.

        Args:
            batches: pytrees of arrays, dim 0 being the sample.
            steps: updates to do.
            on_metrics: called with the update's number and its metrics whenever they are looked at.
            assembled: what `assemble` gave for such batches, to not do it again.
        """
        check_count("steps", steps)
        started = time.perf_counter()
        stream = read_batches(batches)
        first = next(stream, None)
        if first is None:
            raise UserError(
                "there are no batches to train on",
                why="the iterable gave none",
                fix="give at least one; a generator can be gone through only once",
            )
        assembled = assembled or self.assemble(first)
        state = self._start(assembled)
        losses: dict[int, float] = {}
        metrics: Any = None
        done = 0

        def look() -> None:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            _check_finite(done - 1, values, skipping=state.loss_scale is not None)
            losses[done - 1] = values["loss"]
            if on_metrics is not None:
                on_metrics(done - 1, values)

        for batch in itertools.islice(itertools.chain([first], stream), steps):
            state, metrics = assembled.step(state, assembled.put_batch(batch))
            done += 1
            if done in (1, steps) or done % self.log_every == 0:
                look()
        if done < steps:
            _warn_ran_out(done, steps)
            if done - 1 not in losses:
                look()
        return FitResult(losses, done, time.perf_counter() - started, state, assembled)

    def assemble(self, batch: Any) -> Assembled:
        """Make the step for batches of this shape; nothing runs yet."""
        batch = read_batch(batch)
        return assemble(
            model_source(self.model, self.loss, lambda: batch),
            self.loss,
            self.optimizer,
            self._plan(form_of(batch).num_samples),
            batch,
            clip_norm=self.clip_norm,
            trainable=self.trainable,
            devices=self.devices,
        )

    def verify(self, batches: Callable[[int], Any], *, steps: int = 5) -> Certificate:
        """Prove that training on the mesh equals training on one device.

        Args:
            batches: the global batch of each update, by its number.
            steps: updates to compare in float64.
        """
        check_count("steps", steps)
        first = read_batch(batches(0))
        return verify(
            model_source(self.model, self.loss, lambda: first),
            self.loss,
            self._plan(form_of(first).num_samples),
            lambda step: read_batch(batches(step)),
            optimizer=self.optimizer,
            steps=steps,
            clip_norm=self.clip_norm,
            seed=self.seed,
            trainable=self.trainable,
            devices=self.devices,
        )

    def _start(self, assembled: Assembled) -> TrainState:
        return assembled.adopt(self.model) if exists(self.model) else assembled.init(self.seed)

    def _plan(self, num_samples: int) -> Plan:
        if isinstance(self.mesh, Plan):
            plan = self.mesh
            self._check_given(plan, num_samples)
        else:
            plan = self._make_plan(num_samples)
        check_supported(plan)
        return plan

    def _make_plan(self, num_samples: int) -> Plan:
        count = len(self.devices) if self.devices is not None else jax.device_count()
        sizes = resolve_sizes(asked_sizes(self.mesh), count)
        return Plan(
            mesh=shown_sizes(sizes),
            batch=solve_batch(
                replicas=sizes.get("data", 1) * sizes.get("fsdp", 1),
                global_batch_size=num_samples,
                gradient_accumulation_steps=self.gradient_accumulation_steps,
                sync_gradients_every=self.sync_gradients_every,
            ),
            sharding=self.sharding,
            precision=self.precision,
        )

    def _check_given(self, plan: Plan, num_samples: int) -> None:
        batch = plan.batch
        beside: dict[str, tuple[Any, Any, Any]] = {
            "precision": (self.precision, "no", plan.precision),
            "sharding": (self.sharding, ShardingConfig(), plan.sharding),
            **{
                name: (getattr(self, name), 1, getattr(batch, name))
                for name in ("gradient_accumulation_steps", "sync_gradients_every")
            },
        }
        for name, (given, default, planned) in beside.items():
            if given not in (default, planned):
                raise UserError(
                    f"{name} is given beside a plan that says otherwise",
                    why=f"the trainer has {given}, the plan {planned}",
                    fix=f"leave {name} out, or change it in the plan",
                )
        if num_samples != batch.global_batch_size:
            raise UserError(
                f"the batches have {num_samples} samples, and the plan is for "
                f"{batch.global_batch_size}",
                fix=f"give batches of {batch.global_batch_size}, or make a plan for {num_samples}",
            )


def _warn_ran_out(done: int, steps: int) -> None:
    warnings.warn(
        f"the batches ran out after {done} of {steps} updates; the result holds what was trained. "
        f"Give at least {steps} batches, or a generator without an end",
        UserWarning,
        stacklevel=3,
    )


def _check_finite(step: int, metrics: Metrics, *, skipping: bool) -> None:
    if np.isfinite(metrics["loss"]) or skipping:
        return
    raise UserError(
        f"the loss is {metrics['loss']} at update {step}",
        why="the first batch already gives it: the model or the data holds a value that is not "
        "finite"
        if step == 0
        else "training diverged",
        fix="check the data and the loss on one sample"
        if step == 0
        else "try a smaller learning rate, or clip_norm=1.0",
    )
