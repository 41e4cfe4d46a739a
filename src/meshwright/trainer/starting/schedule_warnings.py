"""Warnings about schedules that do something else than their settings seem to say."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
import optax

from meshwright.checkpoint import CheckpointMetadata
from meshwright.config.schema import Config
from meshwright.data.protocols import Data
from meshwright.errors import MeshwrightError, Setting
from meshwright.recipe import learning_rate, training_duration
from meshwright.text.units import counted

WARMUP = "optimizer.warmup_steps"
NOTICEABLE = 1.01
"""A learning rate that is higher by this factor has been raised."""


def schedule_warnings(
    config: Config,
    data: Data,
    batch_size: int,
    *,
    overrides: Iterable[str] = (),
    chosen: Iterable[str] = (),
    resumed: CheckpointMetadata | None = None,
) -> list[str]:
    """Return warnings about the length and the learning rate of a run.

    Args:
        config: the config of the run.
        data: its training data.
        batch_size: samples per global batch.
        overrides: the keys that were given, as opposed to those of files.
        chosen: the keys that the user set anywhere. A default warm-up that is longer than a short
            trial run is no news.
        resumed: the checkpoint the run resumes from.
    """
    updates = _updates(config, data, batch_size)
    return [
        *_overridden_steps(config, updates, overrides),
        *(_long_warmup(config, updates, batch_size) if WARMUP in chosen else []),
        *([] if resumed is None else _raised_rate(config, data, updates, resumed)),
    ]


def _updates(config: Config, data: Data, batch_size: int) -> int | None:
    """Return the number of updates of a run; None for a time."""
    duration = training_duration(config)
    samples = None if duration.epochs is None else data.num_samples
    return duration.total_updates(num_samples=samples, batch_size=batch_size)


def _overridden_steps(config: Config, updates: int | None, overrides: Iterable[str]) -> list[str]:
    duration, steps = config.training.max_duration, config.training.steps
    if duration is None or "training.steps" not in overrides or updates == steps:
        return []
    length = "" if updates is None else f", which is {counted(updates, 'update')}"
    return [
        f"{Setting('training.max_duration', duration)} overrides "
        f"{Setting('training.steps', steps)}: the run ends after "
        f"{duration}{length}; leave one of the two out"
    ]


def _long_warmup(config: Config, updates: int | None, batch_size: int) -> list[str]:
    warmup = config.optimizer.warmup_steps
    if updates is None or not warmup or warmup < updates:
        return []
    rate = learning_rate(config, batch_size, updates)
    return [
        f"{Setting('optimizer.warmup_steps', warmup)} is not shorter than the run of "
        f"{counted(updates, 'update')}: the learning rate ends at {_at(rate, updates - 1):.3g} "
        f"and never reaches {_at(rate, warmup):.3g}"
    ]


def _raised_rate(
    config: Config, data: Data, updates: int | None, resumed: CheckpointMetadata
) -> list[str]:
    """Warn if a longer run raises a learning rate that had decayed at the checkpoint."""
    try:
        before = Config.parse(dict(resumed.config))
        old_updates = _updates(before, data, resumed.global_batch_size)
        old = learning_rate(before, resumed.global_batch_size, old_updates)
    except MeshwrightError:
        # A config of another version, or of a run from Python, which has none.
        return []
    new = learning_rate(config, resumed.global_batch_size, updates)
    done = resumed.update
    if not done or _at(new, done) <= NOTICEABLE * _at(old, done):
        return []
    last, rate = _at(old, done - 1), _at(new, done)
    longer = f" ended at update {old_updates} and now ends at update {updates}"
    why = "" if old_updates == updates else longer
    schedule = Setting("optimizer.schedule", config.optimizer.schedule)
    return [
        f"the learning rate rises again: it was {last:.3g} at the checkpoint (update {done}) and "
        f"is {rate:.3g} after it ({schedule}{why}); "
        f"to stay low, add {Setting('optimizer.schedule', 'constant')}, the "
        f"{Setting('optimizer.learning_rate')} to go on with, and "
        f"{Setting('checkpoint.accept_changes', True)}"
    ]


def _at(rate: optax.Schedule, update: int) -> float:
    # On a CPU, where it does not wait for other work.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(np.asarray(rate(update)))
