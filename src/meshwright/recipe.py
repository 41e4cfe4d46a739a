"""From a config to the objects of a run: model builder, loss, optimizer and data."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshwright import models, tasks
from meshwright.config.argument_checks import check_count, check_optimizer
from meshwright.config.builders import (
    Builder,
    build,
    check_arguments,
    defaults_of,
    explain_failure,
    find_builder,
    import_named,
    parameters_of,
)
from meshwright.config.duration import Duration, parse_duration
from meshwright.config.schema import Config, OptimizerConfig
from meshwright.data.batches import read_batch
from meshwright.data.config_data import ConfigData
from meshwright.data.protocols import Data
from meshwright.data.rollout_data import as_rollouts
from meshwright.errors import ANY, MeshwrightError, Setting, UserError
from meshwright.inputs.checks import check_rows
from meshwright.inputs.user_model import call_with_rngs, model_source
from meshwright.inputs.user_task import HasLoss, read_task
from meshwright.mesh.build import Device
from meshwright.models.model_sizes import check_sizes
from meshwright.plan import Plan
from meshwright.program.trace.build_model import ModelSource, describe_model
from meshwright.program.trace.keep_apart import NotApart, accepted_names
from meshwright.program.trace.traced_loss import Loss, LossOutput, Model, trace_loss
from meshwright.program.trace.trained_leaves import Trained, trained_by
from meshwright.rewards.reward_set import read_rewards
from meshwright.runtime.activity import activity
from meshwright.runtime.user_code import doing, explaining_axis_names, whole_traceback
from meshwright.step.assemble import Assembled, assemble
from meshwright.step.average import with_average
from meshwright.tasks.grpo import GRPO
from meshwright.tasks.language_modeling import LanguageModeling
from meshwright.trees import Batch

_SHARED_SIZES = (
    "vocab_size", "context_length", "input_name", "input_shape", "num_classes", "for_prompts",
)  # fmt: skip
"""Sizes that the data take from the task or, if it has none, from the model."""

LONGEST_ROW = 2048
"""Longest row of tokens unless the config asks for more: models know up to 131,072 positions."""


@dataclass(frozen=True)
class Recipe:
    """The objects that a config describes.

    Attributes:
        model: builds the model from random streams.
        loss: the task's loss; an exception inside it becomes a `UserError` about the config.
        eval_loss: what evaluations compute instead; None for the loss.
        config_data: the data, for training and held out.
        ema_decay: the decay of a moving average of the weights; None keeps none.
        clip_norm: largest global gradient norm; None does not clip.
        duration: how long to train.
        guarded: whether steps that are not finite change nothing.
        trained: what is trained: variables, or adapters.
    """

    model: ModelSource
    loss: Loss
    eval_loss: Loss | None
    task: HasLoss
    config_data: ConfigData
    optimizer: optax.GradientTransformation
    ema_decay: float | None
    clip_norm: float | None
    learning_rate: optax.Schedule
    duration: Duration
    guarded: bool = True
    trained: Trained = nnx.Param

    @property
    def whole_optimizer(self) -> optax.GradientTransformation:
        """The optimizer, with the moving average of the weights if one is kept."""
        return with_average(self.optimizer, self.ema_decay)

    @property
    def data(self) -> Data:
        """The data to train on."""
        return as_rollouts(self.config_data.train, self.task)

    @property
    def eval_data(self) -> Data | None:
        """The held-out data for evaluation; None without any."""
        return self.config_data.held_out

    def assemble(
        self, plan: Plan, batch: Batch, *, devices: Sequence[Device] | None = None
    ) -> Assembled:
        """Build the step for a plan and batches of this shape; nothing is compiled yet.

        By default the mesh has all devices of this process.
        """
        return assemble(
            self.model,
            self.loss,
            self.whole_optimizer,
            plan,
            batch,
            clip_norm=self.clip_norm,
            trainable=self.trained,
            guarded=self.guarded,
            devices=devices,
        )

    def example_batch(self, batch_size: int) -> Batch:
        """Return the shapes of a global batch; the first to ask may wait for the data."""
        with activity("reading the data"), doing("reading batch 0"):
            batch = read_batch(self.data.batch(0, batch_size))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def make_recipe(config: Config, global_batch_size: int) -> Recipe:
    """Make the objects of a run; the learning rate may depend on the global batch."""
    task = make_task(config)
    loss = _explained(task.loss, config)
    config_data = find_data(config, task)
    duration = training_duration(config)
    steps = None
    # A constant learning rate does not depend on the data, which may be given later.
    if duration.seconds is None and config.optimizer.schedule != "constant":
        data = as_rollouts(config_data.train, task) if duration.epochs is not None else None
        samples = None if data is None else data.num_samples
        steps = duration.total_steps(num_samples=samples, batch_size=global_batch_size)
    rate = learning_rate(config, global_batch_size, steps)
    return Recipe(
        model=_model_source(config, loss, config_data),
        loss=loss,
        eval_loss=_eval_loss(config, task),
        task=task,
        config_data=config_data,
        optimizer=make_optimizer(config, rate),
        ema_decay=config.training.ema_decay,
        clip_norm=config.optimizer.clip_norm,
        learning_rate=rate,
        duration=duration,
        guarded=config.training.on_nonfinite != "apply",
        trained=trained_by(config.training.trainable or nnx.Param, config.lora),
    )


def make_model_source(config: Config) -> ModelSource:
    """Return what builds the model of a config, without reading data unless it has to."""
    task = make_task(config)
    return _model_source(config, task.loss, find_data(config, task))


def training_duration(config: Config) -> Duration:
    """Return the training duration of a config."""
    text = config.training.max_duration
    return Duration(steps=config.training.steps) if text is None else parse_duration(text)


def check_sections(config: Config) -> None:
    """Check that every ``kind`` exists and accepts its arguments."""
    model_builder(config)
    find_data(config, make_task(config)).check()
    _optimizer_arguments(config.optimizer)


def model_builder(config: Config) -> ModelSource:
    """Return a function that builds the model from random streams."""
    kind, builder = config.model.kind, _model_class(config)
    arguments = check_arguments("model", builder, config.model.arguments(), supplied=("rngs",))
    if kind in models.MODEL_KINDS:
        build("model", kind, check_sizes, {**defaults_of(builder), **arguments})
    call = call_with_rngs(builder, arguments)
    return lambda rngs: build("model", kind, lambda: call(rngs), {})


def make_task(config: Config) -> HasLoss:
    """Return the task; sizes it shares with the model default to the model's."""
    builder = find_builder("task", config.task.kind, tasks.TASK_KINDS, tasks.find_task)
    accepted: Collection[str] = parameters_of(builder)
    known = _shared_sizes(config)
    if isinstance(builder, type) and issubclass(builder, GRPO):
        own = {**defaults_of(_model_class(config)), **config.model.arguments()}
        known["context_length"] = own.get("context_length")
        known |= {**config.grpo.model_dump(), **config.generation.model_dump()}
        known["reward_names"] = read_rewards(config.grpo.rewards, config.grpo.reward_weights).names
        accepted = builder.model_fields
    shared = {name: value for name, value in known.items() if name in accepted}
    return read_task(config.task.kind, builder, {**shared, **config.task.arguments()})


def find_data(config: Config, task: HasLoss) -> ConfigData:
    """Return the data of a config, not read yet."""
    sizes = _shared_sizes(config)
    check_rows(config)
    if "sequence_length" in (given := config.data.arguments()) and ":" not in config.data.kind:
        check_count("data.sequence_length", given["sequence_length"])
    shared = {name: getattr(task, name, sizes.get(name)) for name in _SHARED_SIZES}
    shared["sequence_length"] = shared["context_length"]
    shared["mixes"] = partial(mixes_documents, config, task)
    known = {name: value for name, value in shared.items() if value is not None}
    return ConfigData(config.data, config.run.seed, known, task)


def mixes_documents(config: Config, task: HasLoss) -> str:
    """Say why documents packed into a row would see one another; empty if they would not."""
    builder = _model_class(config)
    call = getattr(builder, "__call__", None) if inspect.isclass(builder) else None  # noqa: B004
    if call is not None and accepted_names(call, ["segment_ids"]):
        return ""
    if not isinstance(task, LanguageModeling):
        return "the model's call takes no `segment_ids`, and the task is not language_modeling"
    shape = (2, task.context_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    batch: Batch = dict.fromkeys(("tokens", "segment_ids", "positions"), tokens)
    batch["mask"] = jax.ShapeDtypeStruct((shape[0], shape[1] - 1), np.float32)
    try:
        trace_loss(_explained(task.loss, config), describe_model(model_builder(config)), batch)
    except UserError as error:
        return error.why if isinstance(error, NotApart) else f"the loss fails: {error.what}"
    return ""


def make_optimizer(config: Config, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return the optax optimizer with its learning-rate schedule."""
    builder, arguments = _optimizer_arguments(config.optimizer)
    arguments = {"learning_rate": rate, **arguments}
    optimizer = build("optimizer", config.optimizer.kind, builder, arguments)
    check_optimizer(optimizer)
    return optimizer


def learning_rate(config: Config, global_batch_size: int, steps: int | None) -> optax.Schedule:
    """Return the learning rate as a function of the step, scaled with the global batch.

    ``steps`` is the number of steps; None if it is not known.
    """
    optimizer = config.optimizer
    if steps is None and optimizer.schedule != "constant":
        raise UserError(
            f"{Setting('optimizer.schedule', optimizer.schedule)} needs the number of steps",
            why=f"{Setting('training.max_duration', config.training.max_duration)} is a time",
            fix=f"write {Setting('optimizer.schedule', 'constant')}, or "
            f"{Setting('training.steps', ANY)} instead of a time",
        )
    peak = optimizer.learning_rate * _batch_factor(optimizer, global_batch_size)
    after = max((steps or 0) - optimizer.warmup_steps, 1)
    schedules: Mapping[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after),
        "linear": lambda: optax.linear_schedule(peak, 0.0, after),
    }
    schedule = schedules[optimizer.schedule]()
    if not optimizer.warmup_steps:
        return schedule
    warmup = optax.linear_schedule(0.0, peak, optimizer.warmup_steps)
    return optax.join_schedules([warmup, schedule], [optimizer.warmup_steps])


def _model_source(config: Config, loss: Loss, data: ConfigData) -> ModelSource:
    return model_source(model_builder(config), loss, lambda: read_batch(data.train.batch(0, 1)))


def _eval_loss(config: Config, task: HasLoss) -> Loss | None:
    """Return what evaluations compute: the function the config names, or the task's eval_loss."""
    name = config.training.eval_loss
    if name is None:
        own = getattr(task, "eval_loss", None)
        return None if own is None else _explained(own, config)
    setting = f"training.eval_loss={name}"
    function: Any = import_named(setting, name)
    parameters = parameters_of(function)
    required = [each for each, p in parameters.items() if p.default is p.empty]
    if inspect.isclass(function) or len(parameters) < 2 or len(required) > 2:
        raise UserError(
            f"{setting} is not a loss",
            why=f"it takes ({', '.join(parameters)}), but is called with a model and a batch",
            fix="name a function eval_loss(model, batch)",
        )
    return _explained(function, config, setting)


def _explained(loss: Loss, config: Config, setting: str | None = None) -> Loss:
    """Return the loss with exceptions turned into errors about the config."""

    @wraps(loss)
    def explained(model: Model, batch: Batch) -> LossOutput:
        try:
            with explaining_axis_names():
                return loss(model, batch)
        except MeshwrightError:
            raise
        except Exception as error:
            named = setting or f"task.kind={config.task.kind}"
            what = f"{named} fails on model.kind={config.model.kind}"
            fix = f"choose a task and data that fit the model\n{whole_traceback()}".strip()
            raise explain_failure(what, error, fix) from error

    return explained


def _batch_factor(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    if optimizer.scale_learning_rate == "none":
        return 1.0
    if optimizer.base_batch_size is None:
        raise UserError(
            f"{Setting('optimizer.scale_learning_rate', optimizer.scale_learning_rate)} needs a "
            "base batch",
            fix=f"write {Setting('optimizer.base_batch_size', ANY)}, the batch size that the "
            "learning rate is for",
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


def _model_class(config: Config) -> Builder:
    return find_builder("model", config.model.kind, models.MODEL_KINDS, models.find_builder)


def _shared_sizes(config: Config) -> dict[str, Any]:
    """Return the model's arguments, defaults included, with the shape of its images.

    Rows have at most `LONGEST_ROW` tokens.
    """
    sizes = {**defaults_of(_model_class(config)), **config.model.arguments()}
    context = sizes.get("context_length")
    if isinstance(context, int):
        sizes["context_length"] = min(context, LONGEST_ROW)
    side, channels = sizes.get("image_size"), sizes.get("channels_in")
    if isinstance(side, int) and isinstance(channels, int):
        sizes.setdefault("input_shape", (side, side, channels))
    return sizes
