"""Warnings about a run, at its start and at its end, and settings that do not go together."""

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from meshwright.checkpoint import CheckpointMetadata
from meshwright.config.batch import Batch
from meshwright.config.schema import Config
from meshwright.errors import ANY, MeshwrightError, Setting, UserError, did_you_mean
from meshwright.mesh.axes import MODEL_AXES, describe_sizes
from meshwright.plan import TINY_SHARD, Plan
from meshwright.program.trace.model_leaves import Leaf
from meshwright.recipe import Recipe, learning_rate, training_duration
from meshwright.text.units import counted
from meshwright.tracking.log_lines import levels_inside
from meshwright.trainer.callbacks import EarlyStopping
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.programs import Programs
from meshwright.trainer.run_progress import StopReason
from meshwright.trainer.starting.learning_rate import rate_at
from meshwright.trainer.trained.fit_result import FitResult

WARMUP = "optimizer.warmup_steps"
NOTICEABLE = 1.01
"""A learning rate that is higher by this factor has been raised."""


def repeated_samples(batch_size: int, num_samples: int | None) -> list[str]:
    """Warn if a batch holds more samples than there are."""
    if num_samples is None or batch_size <= num_samples:
        return []
    return [
        f"a batch of {batch_size} samples repeats each of the {num_samples} samples "
        f"{batch_size / num_samples:.3g} times on average; use a batch of at most {num_samples} to "
        "repeat none"
    ]


def over_sharded(plan: Plan, num_parameters: int) -> list[str]:
    """Warn if a tensor axis leaves a device less of the model than is worth waiting for."""
    own = num_parameters // math.prod(plan.size(axis) for axis in MODEL_AXES)
    if plan.size("tensor") == 1 or own >= TINY_SHARD:
        return []
    return [
        f"{describe_sizes(plan.mesh)} leaves each device {own:,} of {num_parameters:,} parameters, "
        "so that devices wait for each other more than they compute; "
        f"{Setting('mesh.data', plan.num_devices)} sends less, if the batch can be divided"
    ]


def other_microbatches(
    metadata: CheckpointMetadata, batch: Batch, leaves: Iterable[Leaf]
) -> list[str]:
    """Warn if dropout or statistics depend on the number of microbatches, and it has changed."""
    before = metadata.plan.get("batch", {}).get("gradient_accumulation_steps")
    now = batch.gradient_accumulation_steps
    if before in (None, now) or all(leaf.role == "param" for leaf in leaves):
        return []
    warning = (
        f"a step had {counted(before, 'microbatch')} before the checkpoint and "
        f"has {now} now, which changes dropout and batch statistics"
    )
    size, most = batch.global_batch_size, batch.global_batch_size // before
    if size % (before * batch.replicas) == 0:
        return [f"{warning}; gradient_accumulation_steps={before} keeps them"]
    if size % before == 0:
        return [
            f"{warning}; gradient_accumulation_steps={before} would keep them on a mesh whose "
            f"data × fsdp divides {most}, which {batch.replicas} does not"
        ]
    return [warning]


def schedule_warnings(
    config: Config,
    recipe: Recipe,
    batch_size: int,
    *,
    overrides: Iterable[str] = (),
    chosen: Iterable[str] = (),
) -> list[str]:
    """Return warnings about the length and the learning rate of a run.

    ``overrides`` are the keys that were given, as opposed to those of files. A default warm-up,
    which is not ``chosen``, is not worth a warning if it is longer than a short trial run.
    """
    steps = _steps(config, recipe, batch_size)
    return [
        *_overridden_steps(config, steps, overrides),
        *(_long_warmup(config, steps, batch_size) if WARMUP in chosen else []),
    ]


def fitting_warmup(
    config: Config, chosen: Iterable[str], before: CheckpointMetadata | None
) -> tuple[Config, list[str]]:
    """Return a config whose default warm-up takes at most a tenth of the run, and what to say.

    A resumed run keeps the warm-up it began with.
    """
    warmup, steps = config.optimizer.warmup_steps, training_duration(config).steps
    if WARMUP in chosen or steps == 0:
        return config, []
    fitting = warmup if steps is None else min(warmup, steps // 10)
    if before is not None and before.config:
        fitting = before.config["optimizer"].get("warmup_steps", warmup)
    if fitting == warmup:
        return config, []
    optimizer = config.optimizer.model_copy(update={"warmup_steps": fitting})
    said = f"the warm-up takes {counted(fitting, 'step')} instead of the default's {warmup}"
    why = ", as before" if before else f", a tenth of the run of {counted(steps or 0, 'step')}"
    return config.model_copy(update={"optimizer": optimizer}), [
        f"{said}{why}; write {Setting(WARMUP, warmup)} to have {warmup}"
    ]


def no_rate_left(schedule: Callable[[int], Any] | None, done: int, steps: int | None) -> list[str]:
    """Warn if a run goes on after the end of its schedule, with a learning rate of 0."""
    if schedule is None or steps is None or steps - done < 2 or rate_at(schedule, steps - 2):
        return []
    first = bisect_left(range(steps - 2), True, key=lambda done: not rate_at(schedule, done))
    # A rate that is 0 from the beginning is meant.
    if not first or rate_at(schedule, steps - 1):
        return []
    return [
        f"the learning rate is 0 from step {max(first, done) + 1} to step {steps}: the schedule "
        f"ends after {counted(first, 'step')}, and nothing is learned after it"
    ]


def _steps(config: Config, recipe: Recipe, batch_size: int) -> int | None:
    """Return the number of steps of a run; None for a time."""
    duration = training_duration(config)
    samples = None if duration.epochs is None else recipe.data.num_samples
    return duration.total_steps(num_samples=samples, batch_size=batch_size)


def _overridden_steps(config: Config, total: int | None, overrides: Iterable[str]) -> list[str]:
    duration, steps = config.training.max_duration, config.training.steps
    if duration is None or "training.steps" not in overrides or total == steps:
        return []
    length = "" if total is None else f", which is {counted(total, 'step')}"
    return [
        f"{Setting('training.max_duration', duration)} overrides "
        f"{Setting('training.steps', steps)}: the run ends after "
        f"{duration}{length}; leave one of the two out"
    ]


def _long_warmup(config: Config, steps: int | None, batch_size: int) -> list[str]:
    warmup = config.optimizer.warmup_steps
    if not steps or not warmup or warmup < steps:
        return []
    rate = learning_rate(config, batch_size, steps)
    return [
        f"{Setting('optimizer.warmup_steps', warmup)} is not shorter than the run of "
        f"{counted(steps, 'step')}: the learning rate ends at {rate_at(rate, steps - 1):.3g} "
        f"and never reaches {rate_at(rate, warmup):.3g}"
    ]


def raised_rate(
    config: Config, recipe: Recipe, batch_size: int, resumed: CheckpointMetadata
) -> list[str]:
    """Warn if a longer run raises a learning rate that had decayed at the checkpoint."""
    steps = _steps(config, recipe, batch_size)
    try:
        before = Config.parse(dict(resumed.config))
        old_steps = _steps(before, recipe, resumed.global_batch_size)
        old = learning_rate(before, resumed.global_batch_size, old_steps)
    except MeshwrightError:
        # A config of another version, or of a run from Python, which has none.
        return []
    if config.optimizer.learning_rate != before.optimizer.learning_rate:
        # It was changed on purpose: that had to be accepted.
        return []
    new = learning_rate(config, resumed.global_batch_size, steps)
    done = resumed.step
    if not done or rate_at(new, done) <= NOTICEABLE * rate_at(old, done):
        return []
    last, rate = rate_at(old, done - 1), rate_at(new, done)
    longer = f" ended at step {old_steps} and now ends at step {steps}"
    why = "" if old_steps == steps else longer
    schedule = Setting("optimizer.schedule", config.optimizer.schedule)
    return [
        f"the learning rate rises again: it was {last:.3g} at the checkpoint (step {done}) and "
        f"is {rate:.3g} after it ({schedule}{why}); "
        f"to stay low, add {Setting('optimizer.schedule', 'constant')}, the "
        f"{Setting('optimizer.learning_rate')} to continue with, and "
        f"{Setting('checkpoint.accept_changes', True)}"
    ]


def warn_of_end(result: FitResult, before: int, asked: FitSettings, batch_size: int) -> None:
    """Warn if batches ran out, nothing was trained, or samples were left out."""
    steps = None if asked.duration is None else asked.duration.steps
    texts: list[str] = []
    if result.stop.reason is StopReason.OUT_OF_BATCHES:
        texts.append(
            f"{result.stop.text}, and training stopped there. Give more batches, or write "
            "epochs=… for data that can be read again"
        )
    elif steps != 0 and result.steps == before:
        more = steps or before
        texts.append(
            f"this trainer had already done {before} steps, and nothing was trained. The length "
            f"of a run counts from its first step: write steps={before + more} to do {more} "
            "more, or restart=True to start over"
        )
    if asked.data is not None and (dropped := asked.data.num_dropped):
        texts.append(
            f"the last batch of the data has {dropped} samples instead of {batch_size}, and was "
            "not trained on. Give the samples instead of batches, or a batch size that divides "
            "their number, to use them all"
        )
    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=levels_inside())


def check_rewinding(on_nonfinite: str, asked: FitSettings) -> None:
    """Refuse to rewind where nothing is saved."""
    if on_nonfinite != "rewind" or asked.saves:
        return
    if asked.run_dir is None:
        why, fix = "the run has no folder", f"write {Setting('hydra.run.dir', ANY)}"
    else:
        why, skip = Setting("checkpoint.enabled", False), Setting("training.on_nonfinite", "skip")
        fix = f"write {Setting('checkpoint.enabled', True)}, or {skip}"
    raise UserError(
        f"{Setting('training.on_nonfinite', 'rewind')} needs checkpoints to go back to",
        why=str(why),
        fix=fix,
    )


def check_early_stopping(asked: FitSettings, programs: Programs) -> None:
    """Refuse early stopping by evaluations or metrics that there are not."""
    watched = {each.metric for each in asked.callbacks if isinstance(each, EarlyStopping)}
    if not watched:
        return
    if asked.eval_data is None:
        raise UserError(
            "early stopping counts evaluations, and there is no data to evaluate on",
            fix=f"hold out data with {Setting('data.eval_fraction', ANY)}, or leave out early "
            "stopping",
        )
    if asked.eval_every is None:
        raise UserError(
            "early stopping counts evaluations, and there is only one, at the end",
            why=f"{Setting('training.eval_every')} is not set",
            fix=f"write {Setting('training.eval_every', ANY)} too",
        )
    names = ["loss"] if watched == {"loss"} else ["loss", *programs.evaluated_metrics()]
    for metric in sorted(watched.difference(names)):
        raise UserError(
            f"early stopping watches {metric!r}, which evaluations do not have",
            why=f"they have {', '.join(names)}",
            fix=did_you_mean(metric, names)
            or f'return it with the loss: return loss, {{"{metric}": …}}',
        )
