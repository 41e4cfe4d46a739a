"""The trainer: a model, a loss, an optimizer and a mesh in; a trained model out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.errors import UserError
from meshwright.mesh.axes import parse_mesh, resolve_sizes, shown_sizes
from meshwright.plan import Plan
from meshwright.program.trace import Loss
from meshwright.step.assemble import Assembled, assemble
from meshwright.step.state import TrainState

Metrics = dict[str, float]
OnMetrics = Callable[[int, Metrics], None]


@dataclass(frozen=True)
class FitResult:
    """What a training run gave.

    Attributes:
        losses: the mean loss of every logged update, by update.
        seconds: time spent, compilation included.
        state: the state at the end.
        assembled: the step and what it was made from.
    """

    losses: dict[int, float]
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
        model: builds the model from `nnx.Rngs`, or a model that exists already.
        loss: ``loss(model, batch)``: a scalar mean, or `Weighted(total, weight)`; optionally with
            a dict of metrics.
        optimizer: any optax transformation.
        mesh: ``"fsdp=4,tensor=2"``, a mapping of axis sizes, or a whole `Plan`.
        precision: no (float32), bf16 or fp16.
        gradient_accumulation_steps: microbatches per update.
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
    mesh: str | Mapping[str, int] | Plan = ""
    precision: Precision = "no"
    gradient_accumulation_steps: int = 1
    clip_norm: float | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    trainable: Any = nnx.Param
    seed: int = 0
    log_every: int = 10
    devices: list[Any] | None = None

    def fit(
        self, batches: Iterable[Any], *, steps: int, on_metrics: OnMetrics | None = None
    ) -> FitResult:
        """Train for ``steps`` updates on host batches of the whole global batch.

        Args:
            batches: pytrees of arrays, dim 0 being the sample; at least ``steps`` of them.
            steps: updates to do.
            on_metrics: called with the update's number and its metrics whenever they are looked at.
        """
        started = time.perf_counter()
        stream = iter(batches)
        first = next(stream, None)
        if first is None:
            raise UserError("there are no batches to train on")
        assembled = self.assemble(first)
        state = self._start(assembled)
        losses: dict[int, float] = {}
        done = 0
        for batch in itertools.islice(itertools.chain([first], stream), steps):
            state, metrics = assembled.step(state, assembled.put_batch(batch))
            if done == 0 or (done + 1) % self.log_every == 0 or done + 1 == steps:
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                _check_finite(done, values, skipping=state.loss_scale is not None)
                losses[done] = values["loss"]
                if on_metrics is not None:
                    on_metrics(done, values)
            done += 1
        if done < steps:
            raise UserError(
                f"the batches ran out after {done} updates", why=f"{steps} were asked for"
            )
        return FitResult(losses, time.perf_counter() - started, state, assembled)

    def assemble(self, batch: Any) -> Assembled:
        """Make the step for batches of this shape; nothing runs yet."""
        return assemble(
            self._builder(),
            self.loss,
            self.optimizer,
            self._plan(batch),
            batch,
            clip_norm=self.clip_norm,
            trainable=self.trainable,
            devices=self.devices,
        )

    def _builder(self) -> Callable[[nnx.Rngs], Any]:
        if self._exists():
            return lambda _: self.model
        return self.model

    def _start(self, assembled: Assembled) -> TrainState:
        return assembled.adopt(self.model) if self._exists() else assembled.init(self.seed)

    def _exists(self) -> bool:
        return isinstance(self.model, nnx.Module | dict)

    def _plan(self, batch: Any) -> Plan:
        if isinstance(self.mesh, Plan):
            return self.mesh
        asked = parse_mesh(self.mesh) if isinstance(self.mesh, str) else self.mesh
        count = len(self.devices) if self.devices is not None else jax.device_count()
        sizes = resolve_sizes(asked, count)
        return Plan(
            mesh=shown_sizes(sizes),
            batch=solve_batch(
                replicas=sizes.get("data", 1) * sizes.get("fsdp", 1),
                global_batch_size=_num_samples(batch),
                gradient_accumulation_steps=self.gradient_accumulation_steps,
            ),
            sharding=self.sharding,
            precision=self.precision,
        )


def _num_samples(batch: Any) -> int:
    leaves = jax.tree.leaves(batch)
    if not leaves or not np.shape(leaves[0]):
        raise UserError("a batch must hold arrays whose dim 0 is the sample")
    return int(np.shape(leaves[0])[0])


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
