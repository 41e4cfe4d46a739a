"""The config schema: every section and key, its meaning and its default."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from meshwright.config.base import Count, Frozen
from meshwright.config.duration import parse_duration
from meshwright.config.lora_section import LoRA
from meshwright.config.reward_sections import GenerationConfig, GrpoConfig
from meshwright.errors import Setting, UserError
from meshwright.hardware import is_local, parse_hardware
from meshwright.mesh.axes import AXES, INFER, resolve_alias

Precision = Literal["no", "bf16", "fp16"]
KernelChoice = Literal["auto", "xla", "none"]
"""Kernels of the platform; their equivalents for any device, to verify them; or none."""
OnNonfinite = Literal["stop", "skip", "rewind", "apply"]

# YAML reads a bare `no` as false.
PrecisionKey = Annotated[
    Precision | None, BeforeValidator(lambda value: "no" if value is False else value)
]
Remat = Literal[
    "none",
    "full",
    "dots",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
]
AxisSize = Annotated[int, Field(le=2**20)]
"""Devices along an axis; more than a million is a typo."""


class KindConfig(Frozen):
    """A section whose other keys are arguments of the builder that ``kind`` names."""

    model_config = ConfigDict(extra="allow")

    kind: str

    def arguments(self) -> dict[str, Any]:
        """Return the keys that are passed to the builder."""
        return dict(self.__pydantic_extra__ or {})


class ModelConfig(KindConfig):
    """The model: a built-in kind, or your own as ``package.module:Class``.

    Attributes:
        kind: gpt, mlp, conv, … or ``package.module:Class``; further keys are its arguments.
        mesh_shape: the mesh as ``[[4, 2], ["fsdp", "tp"]]``, another spelling of ``mesh``.
        weights: a Hugging Face folder with the initial weights.
        init_from: a run or a checkpoint with the initial parameters.
        init_patterns: patterns of the parameter paths to load from it; null loads all.
    """

    mesh_shape: tuple[tuple[AxisSize, ...], tuple[str, ...]] | None = None
    weights: str | None = None
    init_from: str | None = None
    init_patterns: list[str] | None = None

    @field_validator("mesh_shape", mode="before")
    @classmethod
    def _sizes_and_names(cls, value: Any) -> Any:
        pair = value if isinstance(value, list | tuple) else ()
        if value is not None and [isinstance(part, list | tuple) for part in pair] != [True, True]:
            raise ValueError('write sizes and names, such as [[4,2],["fsdp","tp"]]')
        return value


class TaskConfig(KindConfig):
    """The task: a built-in kind, or your own as ``package.module:function``.

    Attributes:
        kind: language_modeling, classification, reconstruction, grpo or
            ``package.module:function``.
    """


class DataConfig(KindConfig):
    """The data: a built-in kind or your own; further keys are its arguments.

    Attributes:
        kind: text, tokens, jsonl, images, … or ``package.module:Name``.
        eval_path: data to evaluate on; null holds out a part of the training data.
        eval_fraction: the fraction to hold out; null means 0.02 for built-in kinds, 0 for yours.
        shuffle: whether to shuffle the samples, in a new order for each epoch.
        on_corrupt: what an unreadable record does: stop the run, or be skipped and counted.
        workers: processes that read ahead; 0 reads in threads.
        prefetch: batches to read ahead; 0 reads each batch when it is needed.
        cache_dir: folder for the tokens of text, JSON Lines and tables, shared by all runs; null
            means the user's cache folder.
    """

    eval_path: str | list[str] | None = None
    eval_fraction: float | None = Field(default=None, ge=0, le=0.5)
    shuffle: bool = True
    on_corrupt: Literal["stop", "skip"] = "stop"
    workers: int = Field(default=0, ge=0, le=1024)
    prefetch: int = Field(default=4, ge=0, le=1024)
    cache_dir: str | None = None


class OptimizerConfig(KindConfig):
    """The optimizer: any optax optimizer by name; further keys are its arguments.

    Attributes:
        kind: the name of an optax optimizer, such as adamw, lion, adafactor or muon.
        learning_rate: peak learning rate.
        warmup_steps: steps over which the learning rate rises from zero.
        schedule: the learning rate after warm-up; cosine and linear reach zero at the last step.
        clip_norm: the global norm that gradients are clipped to; null does not clip.
        scale_learning_rate: how the learning rate scales with the global batch / base_batch_size.
        base_batch_size: the global batch that the learning rate was chosen for.
    """

    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=0, ge=0, lt=2**31)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    clip_norm: float | None = Field(default=1.0, gt=0)
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    base_batch_size: Count | None = None


class TrainingConfig(Frozen):
    """How long to train, with which batch size, and how often to evaluate.

    Attributes:
        steps: optimizer steps; with 0, the initial model is only evaluated and saved.
        max_duration: overrides steps: 1000st (steps), 2ep (epochs), 30min, 12h.
        global_batch_size: samples per step = micro_batch_size × data × fsdp × accumulation.
        micro_batch_size: samples per device and microbatch; auto takes the size that fits and that
            the planner estimates to be fastest.
        gradient_accumulation_steps: microbatches per step.
        sync_gradients_every: microbatches between two gradient reductions.
        mixed_precision: no, fp16 or bf16; another spelling of precision.compute.
        eval_every: steps between two evaluations; null evaluates once, at the end.
        eval_batches: the most batches per evaluation; null evaluates on every sample once.
        eval_loss: a loss for evaluations instead of the task's, as ``package.module:function`` of a
            model and a batch.
        ema_decay: keep a moving average of the weights, of which each step keeps this share, such
            as 0.999; null keeps none.
        eval_ema: whether evaluations during training are of that average.
        early_stopping_patience: how many evaluations without a better loss end the run.
        early_stopping_min_delta: how much lower a loss must be to count as better.
        callbacks: your callbacks, each as ``package.module:Class``, created without arguments.
        sample_tokens: how many tokens a language model generates at the end, as a sample.
        sample_prompt: what the sample begins with; null takes the beginning of a held-out text.
        sample_every: steps between two samples during training; null generates one, at the end.
        on_nonfinite: what to do about a step whose loss or gradient is not finite: stop the run;
            skip the step; rewind to the last checkpoint and skip the batches since; or apply the
            step, for an optimizer that handles such gradients.
        max_skipped: consecutive steps that may be skipped before the run stops.
        max_rewinds: how often a run may rewind before it stops.
        profile_communication: whether to profile a few steps and report where their time goes.
        trainable: path patterns of the parameters to train, such as ``head.**``; the others stay as
            they are. With lora.rank, these are trained besides the adapters.
    """

    steps: int = Field(default=600, ge=0, lt=2**31)
    max_duration: str | None = None
    global_batch_size: Count | None = None
    micro_batch_size: Count | Literal["auto"] | None = None
    gradient_accumulation_steps: Count | None = None
    sync_gradients_every: Count = 1
    mixed_precision: PrecisionKey = None
    eval_every: Count | None = None
    eval_batches: Count | None = None
    eval_loss: str | None = None
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    eval_ema: bool = False
    early_stopping_patience: Count | None = None
    early_stopping_min_delta: float = Field(default=0.0, ge=0)
    callbacks: tuple[str, ...] = ()
    sample_tokens: int = Field(default=200, ge=0, le=100_000)
    sample_prompt: str | None = Field(default=None, min_length=1)
    sample_every: Count | None = None
    on_nonfinite: OnNonfinite = "stop"
    max_skipped: Count = 10
    max_rewinds: Count = 3
    profile_communication: bool = False
    trainable: tuple[str, ...] | None = Field(default=None, min_length=1)

    @field_validator("max_duration")
    @classmethod
    def _readable_duration(cls, text: str | None) -> str | None:
        if text is not None:
            parse_duration(text)
        return text


class MeshConfig(Frozen):
    """Devices per axis; -1 takes the remaining devices. Aliases such as tp and dp are accepted.

    Attributes:
        pipe: pipeline stages.
        data: copies of the model, each on different samples.
        fsdp: devices that shard parameters, gradients and optimizer state, on different samples.
        tensor: devices that shard each layer.
        context: devices that share the positions of each row, for long rows.
        auto: whether the planner chooses the sizes that are not set, along with other settings.
    """

    pipe: AxisSize = 1
    data: AxisSize = INFER
    fsdp: AxisSize = 1
    tensor: AxisSize = 1
    context: AxisSize = 1
    auto: bool = False

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        named: dict[str, Any] = {}
        for key, size in values.items():
            axis = resolve_alias(key)
            if axis == "auto":
                named[axis] = size
                continue
            # A size replaces -1, so that `dp: 2` overrides a file's `data: -1`.
            if axis in named and INFER not in (size, named[axis]) and size != named[axis]:
                raise UserError(
                    f"the {axis} axis of the mesh is given twice",
                    why=f"as {named[axis]} and, by mesh.{key}, as {size}",
                    fix=f"write mesh.{axis} once",
                )
            named[axis] = named.get(axis, INFER) if size == INFER else size
        return named

    @field_validator(*AXES)
    @classmethod
    def _positive(cls, size: int) -> int:
        if size != INFER and size < 1:
            raise ValueError(
                f"a size is 1 or more, or {INFER} for the remaining devices; 1 leaves it unused"
            )
        return size

    def sizes(self) -> dict[str, int]:
        """Return axis sizes as given; one may be -1."""
        return {axis: getattr(self, axis) for axis in AXES}


def _plain_spec(rule: Any) -> Any:
    """Return a PartitionSpec or tuple as a list, in which several axes of one dim are a list."""
    if isinstance(rule, str | dict) or not isinstance(rule, Iterable):
        return rule
    return [list(entry) if isinstance(entry, tuple) else entry for entry in rule]


class ShardingConfig(Frozen):
    """How arrays are sharded.

    Attributes:
        zero: what fsdp shards: 1 the optimizer state, 2 also gradients, 3 also parameters.
        keep_gathered: whether to keep gathered weights instead of gathering them for each block.
        blocks: whether repeated blocks run one by one (unroll) or as a loop over one block (scan).
        min_shard_size: parameters with fewer elements stay replicated over fsdp.
        rules: by path pattern, a role (column, row, replicate) or a partition spec, in which a list
            puts several axes on one dim.
        remat: what the backward pass recomputes: none, full (whole blocks) or dots (blocks except
            their matrix products); or the name of one of JAX's checkpoint policies.
    """

    zero: Literal[1, 2, 3] = 3
    keep_gathered: bool = False
    blocks: Literal["scan", "unroll"] = "unroll"
    min_shard_size: int = Field(default=1024, ge=0)
    rules: dict[str, str | list[str | list[str] | None]] = Field(default_factory=dict)
    remat: Remat = "none"

    @field_validator("rules", mode="before")
    @classmethod
    def _read_rules(cls, rules: Any) -> Any:
        """Take pairs (pattern, rule) as well, and a PartitionSpec for a rule."""
        pairs = rules if isinstance(rules, list | tuple) else ()
        if pairs and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
            rules = {str(pattern): rule for pattern, rule in pairs}
        if not isinstance(rules, dict):
            return rules
        return {pattern: _plain_spec(rule) for pattern, rule in rules.items()}


class PipelineConfig(Frozen):
    """How microbatches pass through pipeline stages.

    Attributes:
        schedule: gpipe, 1f1b, interleaved or zb_h1.
        num_microbatches: microbatches per step, or between two flushes if
            training.gradient_accumulation_steps is a multiple; null means four per stage.
        num_chunks: pieces of the model on each stage, for interleaved.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1"] = "1f1b"
    num_microbatches: Count | None = None
    num_chunks: Count = 2


class PrecisionConfig(Frozen):
    """Number formats; master weights, loss and reductions are always float32.

    Attributes:
        compute: no (float32), bf16 or fp16; null means no.
        matmul: precision of float32 matrix products, such as default, tensorfloat32 or highest.
    """

    compute: PrecisionKey = None
    matmul: Literal["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"] = (
        "default"
    )


class CheckpointConfig(Frozen):
    """Checkpoints of a run, from which it can resume.

    Attributes:
        enabled: whether to save checkpoints in the run folder.
        every: steps between two checkpoints; the last step is always saved.
        keep_last: how many of the newest checkpoints to keep.
        keep_best: how many with the lowest evaluation loss to keep as well.
        accept_changes: whether to resume even if the config differs from the checkpoint's.
    """

    enabled: bool = True
    every: Count = 100
    keep_last: Count = 2
    keep_best: int = Field(default=1, ge=0)
    accept_changes: bool = False


class TrackingConfig(Frozen):
    """Run tracking; the files of the run folder are always written.

    Attributes:
        log_every: steps between two lines of metrics.
        tensorboard: whether to write scalars for TensorBoard into the run folder.
        wandb: whether to send metrics to Weights & Biases; run.project is the project.
        wandb_entity: the user or team at W&B; null means W&B's default.
        mlflow: whether to send metrics to MLflow; run.project is the experiment.
        mlflow_uri: the MLflow server, such as http://host:5000; null means MLflow's default.
    """

    log_every: Count = 10
    tensorboard: bool = False
    wandb: bool = False
    wandb_entity: str | None = None
    mlflow: bool = False
    mlflow_uri: str | None = None


class RunConfig(Frozen):
    """The run itself.

    Attributes:
        project: outputs go to outputs/<project>/<date>/<time>.
        name: the name of the run in reports and trackers; null means its date and time.
        seed: the seed of initialization, data order and dropout.
    """

    project: str = Field(default="meshwright", min_length=1, pattern=r"^\w[\w.-]*$")
    name: str | None = Field(default=None, min_length=1, max_length=200)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @field_validator("project", mode="wrap")
    @classmethod
    def _folder_name(cls, value: Any, check: ValidatorFunctionWrapHandler) -> str:
        try:
            return check(value)
        except ValidationError:
            if not isinstance(value, str):
                raise
        near = re.sub(r"[^\w.-]+", "-", value.strip()).strip(".-")[:60] or "my-project"
        raise UserError(
            f"`{Setting('run.project', value)}` is not valid",
            why="it names a folder: letters, digits, underscores, dots and dashes, and does not "
            "start with a dot or a dash",
            fix=f"write {Setting('run.project', near)}",
        )


class Config(Frozen):
    """A whole run.

    Attributes:
        simulate: number of virtual CPU devices to use.
        hardware: the hardware to plan for, such as 8xA100-40GB; local measures this machine, and
            null looks it up in the table of chips.
        plan: a file from `meshwright plan --out`, which sets mesh, batch, sharding, pipeline and
            precision.
        kernels: what computes known parts of the model, such as attention: auto uses the kernels
            of this platform, xla their equivalents for any device, none the model as written.
        strict: whether a program that deviates from its plan is an error.
        resume: auto resumes from the newest checkpoint in the run folder, if there is one; must
            requires one; never starts from scratch; a path names a run or a checkpoint to resume.
        compilation_cache: whether to keep compiled programs on disk for later runs, or a folder for
            them; null keeps those for accelerators, in the user's cache folder.
    """

    model: ModelConfig
    task: TaskConfig
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    lora: LoRA = LoRA()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    run: RunConfig = RunConfig()
    grpo: GrpoConfig = GrpoConfig()
    generation: GenerationConfig = GenerationConfig()
    simulate: int | None = Field(default=None, ge=1, le=1024)
    hardware: str | None = None
    plan: str | None = None
    kernels: KernelChoice = "auto"
    strict: bool = False
    resume: str = Field(default="auto", min_length=1)
    compilation_cache: bool | str | None = None

    @field_validator("resume", mode="before")
    @classmethod
    def _auto_must_never_or_a_path(cls, value: Any) -> Any:
        if isinstance(value, bool) or str(value).lower() in ("yes", "no", "true", "false", "on"):
            raise ValueError(
                "write resume=auto (from the newest checkpoint in the run folder, if there is "
                "one), resume=must (the same, and an error without one), resume=never, or the path "
                "of a run or a checkpoint"
            )
        return value

    @field_validator("compilation_cache", mode="before")
    @classmethod
    def _yes_no_or_a_folder(cls, value: Any) -> Any:
        words = ("", "yes", "no", "on", "off")
        folder = isinstance(value, str) and value.strip().lower() not in words
        if value is not None and not isinstance(value, bool) and not folder:
            raise ValueError("write true, false or the path of a folder")
        return value

    @field_validator("hardware", mode="before")
    @classmethod
    def _number_of_what(cls, value: object) -> object:
        # On the command line, 8 is a number; what is missing is the chip.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("hardware")
    @classmethod
    def _known_hardware(cls, text: str | None) -> str | None:
        if text is not None and not is_local(text):
            parse_hardware(text)
        return text
