"""From a config to the objects of a run: the model's builder, the loss, the optimizer, the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from meshwright import models, tasks
from meshwright.config.builders import Builder, check_arguments, find_builder, parameters_of
from meshwright.config.schema import Config, OptimizerConfig
from meshwright.data.order import sample_ids
from meshwright.data.text import TextSource
from meshwright.errors import UserError
from meshwright.tasks.task import Task

ModelBuilder = Callable[[nnx.Rngs], nnx.Module]
HostBatch = dict[str, NDArray[Any]]


class Data(Protocol):
    """Where the batches of a run come from."""

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the global batch of one update: a function of the seed and the step alone."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What a config describes, as objects.

    Attributes:
        model: builds the model from its random streams.
        task: loss, metrics and the shape of batches.
        data: where batches come from.
        optimizer: how parameters are updated.
    """

    model: ModelBuilder
    task: Task
    data: Data
    optimizer: optax.GradientTransformation


@dataclass(frozen=True)
class SyntheticData:
    """Batches made up by the task, different for every step."""

    task: Task
    seed: int

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the made-up batch of one update."""
        return self.task.synthetic_batch(hash((self.seed, step)) % 2**31, batch_size)


@dataclass(frozen=True)
class SourceData:
    """Batches read from a source in the global order."""

    source: TextSource
    seed: int

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the rows of one update."""
        ids = sample_ids(
            seed=self.seed, step=step, batch_size=batch_size, num_samples=len(self.source)
        )
        return dict(self.source.rows(ids))


def make_recipe(config: Config, global_batch_size: int) -> Recipe:
    """Make every object of a run; the learning rate may depend on the global batch."""
    task = make_task(config)
    return Recipe(
        model=model_builder(config),
        task=task,
        data=make_data(config, task),
        optimizer=make_optimizer(config, global_batch_size),
    )


def check_sections(config: Config) -> None:
    """Check that every ``kind`` exists and takes the arguments it is given."""
    model_builder(config)
    make_task(config)
    if config.data.kind != "synthetic":
        _data_arguments(config)
    _optimizer_arguments(config.optimizer)


def model_builder(config: Config) -> ModelBuilder:
    """Return a function that builds the model from its random streams."""
    kind = config.model.kind
    builder = find_builder("model", kind, models.MODEL_KINDS, models.find_builder)
    arguments = check_arguments("model", builder, config.model.arguments(), supplied=("rngs",))

    def build(rngs: nnx.Rngs) -> nnx.Module:
        try:
            return builder(**arguments, rngs=rngs)
        except ValueError as error:
            raise UserError(f"model.kind={kind} refuses its arguments", why=str(error)) from error

    return build


def make_task(config: Config) -> Task:
    """Return the task; sizes it shares with the model follow the model unless given."""
    builder = find_builder("task", config.task.kind, tasks.TASK_KINDS, tasks.find_task)
    shared = _shared_arguments(builder, _model_arguments(config))
    arguments = check_arguments("task", builder, {**shared, **config.task.arguments()})
    return builder(**arguments)


def make_data(config: Config, task: Task) -> Data:
    """Return where batches come from."""
    seed = config.run.seed
    if config.data.kind == "synthetic":
        return SyntheticData(task, seed)
    builder, arguments = _data_arguments(config)
    return SourceData(builder(**arguments), seed)


def make_optimizer(config: Config, global_batch_size: int) -> optax.GradientTransformation:
    """Return the optax optimizer with its learning-rate schedule."""
    builder, arguments = _optimizer_arguments(config.optimizer)
    return builder(learning_rate=learning_rate(config, global_batch_size), **arguments)


def learning_rate(config: Config, global_batch_size: int) -> optax.Schedule:
    """Return the learning rate as a function of the update, scaled with the global batch."""
    optimizer, steps = config.optimizer, config.training.steps
    peak = optimizer.learning_rate * _batch_factor(optimizer, global_batch_size)
    after = max(steps - optimizer.warmup_steps, 1)
    courses: Mapping[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after),
        "linear": lambda: optax.linear_schedule(peak, 0.0, after),
    }
    course = courses[optimizer.schedule]()
    if not optimizer.warmup_steps:
        return course
    warmup = optax.linear_schedule(0.0, peak, optimizer.warmup_steps)
    return optax.join_schedules([warmup, course], [optimizer.warmup_steps])


def _batch_factor(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    if optimizer.scale_learning_rate == "none":
        return 1.0
    if optimizer.base_batch_size is None:
        raise UserError(
            f"optimizer.scale_learning_rate={optimizer.scale_learning_rate} needs a reference",
            fix="write optimizer.base_batch_size=… , the batch the learning rate was chosen for",
        )
    ratio = global_batch_size / optimizer.base_batch_size
    return ratio if optimizer.scale_learning_rate == "linear" else float(np.sqrt(ratio))


def _optimizer_arguments(optimizer: OptimizerConfig) -> tuple[Builder, dict[str, Any]]:
    known = [name for name in dir(optax) if _is_optimizer(getattr(optax, name))]
    contrib = [name for name in dir(optax.contrib) if _is_optimizer(getattr(optax.contrib, name))]

    def load(kind: str) -> Builder:
        return getattr(optax, kind) if kind in known else getattr(optax.contrib, kind)

    builder = find_builder("optimizer", optimizer.kind, [*known, *contrib], load)
    supplied = ("learning_rate",)
    return builder, check_arguments("optimizer", builder, optimizer.arguments(), supplied)


def _is_optimizer(value: Any) -> bool:
    return (
        inspect.isfunction(value)
        and not value.__name__.startswith("_")
        and "learning_rate" in parameters_of(value)
    )


def _data_arguments(config: Config) -> tuple[Builder, dict[str, Any]]:
    known: dict[str, Builder] = {"text": TextSource}
    kinds = [*known, "synthetic"]
    builder = find_builder("data", config.data.kind, kinds, lambda kind: known[kind])
    shared: dict[str, Any] = {}
    if "context_length" in (sizes := _model_arguments(config)):
        shared["sequence_length"] = sizes["context_length"]
    given = {**shared, **config.data.arguments()}
    return builder, check_arguments("data", builder, given)


def _model_arguments(config: Config) -> dict[str, Any]:
    """Return the model's arguments with its own defaults filled in."""
    builder = find_builder("model", config.model.kind, models.MODEL_KINDS, models.find_builder)
    parameters = parameters_of(builder).values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {**defaults, **config.model.arguments()}


def _shared_arguments(builder: Builder, sizes: Mapping[str, Any]) -> dict[str, Any]:
    accepted = parameters_of(builder)
    return {name: value for name, value in sizes.items() if name in accepted}
