"""The settings of a trainer, each checked when it is made, and the arguments it does not have."""

import inspect
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.config.argument_checks import (
    check_clip_norm,
    check_count,
    check_kind,
    check_optimizer,
    check_path,
    clear_arguments,
    wrong_kind,
)
from meshwright.config.base import SYNONYMS, shorten
from meshwright.config.lora_section import LoRA
from meshwright.config.schema import (
    CheckpointConfig,
    KernelChoice,
    OnNonfinite,
    PipelineConfig,
    Precision,
    ShardingConfig,
    TrackingConfig,
)
from meshwright.errors import ANY, UserError
from meshwright.inputs.checks import (
    check_kernels,
    check_loss,
    check_precision,
    check_run_name,
    check_trainable,
    mesh_sizes,
)
from meshwright.inputs.user_model import UserModel
from meshwright.mesh.axes import is_whole
from meshwright.mesh.build import Device, check_devices
from meshwright.plan import Plan
from meshwright.program.trace.traced_loss import Loss
from meshwright.program.trace.trained_leaves import Trained, trained_by
from meshwright.rewards.reward_set import read_rewards
from meshwright.step.average import check_decay, with_average
from meshwright.tasks.grpo import GRPO
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.incidents.not_finite import check_policy
from meshwright.weights.hf_model import check_one_folder

MOST_SEED = 2**32 - 1


def no_loss(model: Any, batch: Any) -> Any:
    """Stand for a loss that is not given."""
    raise AssertionError


@dataclass(kw_only=True)
class TrainerSettings:
    """What is trained, and how: the fields of `Trainer`, which describes them.

    ``defaults`` are how `fit` runs unless its arguments say otherwise.
    """

    model: UserModel
    loss: Loss = no_loss
    optimizer: optax.GradientTransformation
    task: GRPO | None = None
    eval_loss: Loss | None = None
    mesh: str | Mapping[str, int] | Plan = ""
    precision: Precision = "no"
    kernels: KernelChoice = "auto"
    gradient_accumulation_steps: int = 1
    sync_gradients_every: int = 1
    clip_norm: float | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    pipeline: PipelineConfig | Mapping[str, Any] | str = field(default_factory=PipelineConfig)
    trainable: Filter = nnx.Param
    lora: LoRA | None = None
    ema_decay: float | None = None
    eval_ema: bool = False
    weights: str | Path | None = None
    init_from: str | Path | None = None
    init_patterns: Sequence[str] | None = None
    on_nonfinite: OnNonfinite = "stop"
    max_skipped: int = 10
    max_rewinds: int = 3
    seed: int = 0
    log_every: int = 10
    run_name: str | None = None
    devices: Sequence[Device] | None = None
    compilation_cache: bool | str | Path | None = None

    def __post_init__(self) -> None:
        self.defaults = FitSettings()
        self._read_task()
        check_loss(self.loss)
        if self.eval_loss is not None:
            check_loss(self.eval_loss, "eval_loss")
        check_run_name(self.run_name)
        check_optimizer(self.optimizer)
        check_precision(self.precision)
        check_kernels(self.kernels)
        check_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_count("sync_gradients_every", self.sync_gradients_every)
        check_count("log_every", self.log_every)
        check_clip_norm(self.clip_norm)
        check_trainable(self.trainable)
        if self.lora is not None:
            check_kind("lora", self.lora, LoRA, "write lora=mw.LoRA(rank=16)")
        check_decay(self.ema_decay)
        check_kind("eval_ema", self.eval_ema, bool, "write True or False")
        check_policy(self.on_nonfinite, self.max_skipped, self.max_rewinds)
        check_devices(self.devices)
        check_kind(
            "sharding", self.sharding, ShardingConfig, "write sharding=mw.ShardingConfig(zero=3)"
        )
        _check_start(self.seed, self.weights, self.init_from, self.init_patterns)
        check_one_folder(self.model, self.weights)
        if self.compilation_cache is not None and not isinstance(self.compilation_cache, bool):
            check_path("compilation_cache", self.compilation_cache)
        read_pipeline(self.pipeline)
        if not isinstance(self.mesh, Plan):
            mesh_sizes(self.mesh)

    def _read_task(self) -> None:
        """Take the loss from the task, if there is one."""
        if self.task is None:
            if self.loss is no_loss:
                raise UserError("there is no loss", fix="write loss=…, or task=mw.GRPO(…)")
            return
        check_kind("task", self.task, GRPO, "write task=mw.GRPO(rewards=…)")
        own = self.task
        if not own.reward_names:
            names = read_rewards(own.rewards, own.reward_weights).names
            self.task = own = own.model_copy(update={"reward_names": names})
        if self.loss not in (no_loss, own.loss):
            raise UserError("loss and task are both given", fix="leave out one of them")
        self.loss = own.loss

    @property
    def whole_optimizer(self) -> optax.GradientTransformation:
        """The optimizer, with the moving average of the weights if one is kept."""
        return with_average(self.optimizer, self.ema_decay)

    @property
    def trained(self) -> Trained:
        """What is trained: the variables of a filter, or adapters."""
        return trained_by(self.trainable, self.lora)

    @property
    def guarded(self) -> bool:
        """Whether a step that is not finite changes nothing."""
        return self.on_nonfinite != "apply"


def _check_start(seed: Any, weights: Any, init_from: Any, init_patterns: Any) -> None:
    """Check where a run starts from."""
    if not is_whole(seed) or not 0 <= seed <= MOST_SEED:
        raise wrong_kind("seed", seed, f"write a whole number from 0 to {MOST_SEED}")
    for name, path in {"weights": weights, "init_from": init_from}.items():
        if path is not None:
            check_path(name, path)
    if init_patterns is None:
        return
    listed = isinstance(init_patterns, Sequence) and not isinstance(init_patterns, str | bytes)
    if not listed or not all(isinstance(each, str) for each in init_patterns):
        fix = 'write a list of path patterns, such as ["blocks.**"]'
        raise wrong_kind("init_patterns", init_patterns, fix)


def read_pipeline(given: Any) -> PipelineConfig:
    """Return the pipeline settings that a name, a mapping or a config gives."""
    if isinstance(given, PipelineConfig):
        return given
    if isinstance(given, str):
        return PipelineConfig.parse({"schedule": given})
    if isinstance(given, Mapping):
        values = typing.cast(Mapping[Any, Any], given)
        return PipelineConfig.parse({str(k): v for k, v in values.items()})
    raise UserError(
        f"the pipeline is {shorten(given)}, of type {type(given).__name__}",
        fix='write pipeline="zb_h1", or '
        'pipeline=mw.PipelineConfig(schedule="zb_h1", num_microbatches=16)',
    )


Kind = TypeVar("Kind")

_BATCH = (
    "the samples of a step are `trainer.fit(…, batch_size=…)`; each device gets an equal part, "
    "in as many microbatches as gradient_accumulation_steps says"
)
_ELSEWHERE = {
    "global_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "learning_rate": "it is the optimizer's: optimizer=optax.adamw(…)",
}
"""Settings of a config that have other names in Python."""

_SECTIONS = {
    "sharding": ShardingConfig,
    "pipeline": PipelineConfig,
    "lora": LoRA,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
}
"""Arguments that take a config of their own."""


def places_unknown(trainer: type[Kind]) -> type[Kind]:
    """Make a trainer class refuse arguments that it does not have, and say where they belong."""
    kind: Any = trainer
    own = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    of_fit = [name for name in inspect.signature(kind.fit).parameters if name != "self"]
    kind.__init__ = clear_arguments(
        trainer.__name__, lambda name, _: _place(name, own, of_fit, "when you train", "trainer.fit")
    )(kind.__init__)
    where = "when you make the trainer", f"mw.{trainer.__name__}"
    for method in ("fit", "evaluate", "predict", "plan", "verify", "ledger"):
        clear = clear_arguments(
            f"trainer.{method}", lambda name, taken: _place(name, taken, own, *where)
        )
        setattr(kind, method, clear(getattr(kind, method)))
    return trainer


def _place(name: str, own: Collection[str], others: Collection[str], when: str, other: str) -> str:
    """Say that an argument belongs to the other call of a training, and when that is made."""
    meant = SYNONYMS.get(name, name)
    if name in others:
        return f"write it {when}: `{other}(…, {name}={ANY})`"
    if meant in _ELSEWHERE:
        return _ELSEWHERE[meant]
    if meant in own:
        return f"did you mean `{meant}`?"
    if meant in others:
        return f"write it {when}: `{other}(…, {meant}={ANY})`"
    for section, config in _SECTIONS.items():
        if name in config.model_fields:
            written = f"{section}=mw.{config.__name__}({name}={ANY})"
            return f"write {written}" if section in own else f"write `{other}(…, {written})`"
    return ""
