"""What `Trainer` and `fit` are given: each argument checked, and read into what the run needs."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.config.argument_checks import (
    MOST_SAMPLES,
    check_count,
    check_kind,
    check_path,
    check_takes,
    wrong_kind,
)
from meshwright.config.base import shorten
from meshwright.config.duration import Duration, parse_duration
from meshwright.config.schema import (
    CheckpointConfig,
    PipelineConfig,
    ShardingConfig,
    TrackingConfig,
)
from meshwright.data.batches import read_batch
from meshwright.data.protocols import Data
from meshwright.errors import UserError
from meshwright.runtime.user_code import doing
from meshwright.step.assemble import Assembled
from meshwright.trainer.callbacks import Callback, OnMetrics
from meshwright.trainer.run_spec import OutputSpec

MOST_SEED = 2**32 - 1


def check_start(sharding: Any, seed: Any, weights: Any, init_from: Any, init_patterns: Any) -> None:
    """Check how arrays are sharded, and where a training starts from."""
    check_kind("sharding", sharding, ShardingConfig, "write sharding=mw.ShardingConfig(zero=3)")
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole or not 0 <= seed <= MOST_SEED:
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


def check_compilation_cache(given: Any) -> None:
    """Check whether compiled programs are kept, and where."""
    if given is not None and not isinstance(given, bool):
        check_path("compilation_cache", given)


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


def read_duration(steps: int | None, max_duration: str | None, epochs: float | None) -> Duration:
    """Return the length of a training, which must be given exactly once."""
    if sum(each is not None for each in (steps, max_duration, epochs)) != 1:
        raise UserError(
            "the length of the training must be given exactly once",
            why=f"steps is {steps}, max_duration is {max_duration} and epochs is {epochs}",
            fix='write steps=1000, epochs=2, or max_duration="30min"',
        )
    if max_duration is not None:
        return parse_duration(max_duration)
    if epochs is not None:
        return parse_duration(f"{epochs}ep")
    check_count("steps", steps, least=0)
    return Duration(updates=steps)


def read_resume(resume: Any, restart: Any) -> str:
    """Return where a training resumes from: auto, must, never or a path."""
    check_kind("restart", restart, bool, "write restart=True to begin anew")
    return "never" if restart else str(check_path("resume", resume))


def read_callbacks(
    callbacks: Any, on_metrics: Callable[[int, dict[str, float]], None] | None
) -> list[Callback]:
    """Return all callbacks of a training, that for ``on_metrics`` included."""
    if not isinstance(callbacks, Sequence):
        raise wrong_kind("callbacks", callbacks, "write a list: callbacks=[mw.EarlyStopping(3)]")
    for callback in typing.cast(Sequence[Any], callbacks):
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else "MyCallback"
            fix = f"write an instance of a subclass of mw.Callback: callbacks=[{name}(…)]"
            raise wrong_kind("callbacks", callback, fix)
    if on_metrics is None:
        return list(callbacks)
    check_takes("on_metrics", on_metrics, ("update", "metrics"))
    return [*callbacks, OnMetrics(on_metrics)]


def read_output(
    run_dir: Any,
    checkpoint: Any,
    tracking: Any,
    progress: Any,
    *,
    log_every: int,
    name: str | None,
) -> OutputSpec:
    """Return what a training writes, and where."""
    if checkpoint is not None:
        check_kind(
            "checkpoint", checkpoint, CheckpointConfig, "write mw.CheckpointConfig(every=100)"
        )
    if tracking is not None:
        check_kind(
            "tracking", tracking, TrackingConfig, "write mw.TrackingConfig(tensorboard=True)"
        )
    if progress is not None:
        check_kind("progress", progress, bool, "write True or False, or leave it out")
    return OutputSpec(
        run_dir=None if run_dir is None else check_path("run_dir", run_dir).absolute(),
        name=name,
        log_every=log_every,
        tracking=tracking or TrackingConfig(),
        progress=progress,
        checkpoint=checkpoint or CheckpointConfig(),
    )


def check_assembled(assembled: Any) -> None:
    """Refuse a step that `assemble` did not build."""
    if assembled is not None:
        check_kind("assembled", assembled, Assembled, "write the result of trainer.assemble(batch)")


def check_evaluation(data: Any, every: Any, batches: Any) -> None:
    """Refuse numbers of evaluations that are none, or without data to evaluate on."""
    if data is None and (every is not None or batches is not None):
        name = "eval_every" if every is not None else "eval_batches"
        raise UserError(
            f"{name} is given, and there is no data to evaluate on",
            fix="write eval_data=… with held-out data, or leave it out",
        )
    if every is not None:
        check_count("eval_every", every)
    if batches is not None:
        check_count("eval_batches", batches)


def first_batch(data: Data, batch_size: int | None) -> Any:
    """Return the first global batch, whose shapes all others must have."""
    if data.any_batch_size:
        if batch_size is None:
            raise UserError(
                "the size of a global batch is not known",
                why=f"the data ({data.describe()}) can be read in batches of any size",
                fix="write batch_size=64, or as many samples as one update takes",
            )
        check_count("batch_size", batch_size, MOST_SAMPLES)
    with doing("reading batch 0"):
        first = data.first_batch(batch_size)
        if first is None:
            raise UserError(
                "there are no batches to train on",
                why="the iterable is empty",
                fix="give at least one batch; a generator can only be read once",
            )
        return read_batch(first)
