"""How one `fit` runs: its arguments, each checked, on top of what a config says."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.config.argument_checks import (
    check_count,
    check_kind,
    check_path,
    check_takes,
    wrong_kind,
)
from meshwright.config.duration import Duration, parse_duration
from meshwright.config.schema import CheckpointConfig, TrackingConfig
from meshwright.data.protocols import Data
from meshwright.errors import UserError
from meshwright.recipe import Recipe
from meshwright.trainer.callbacks import Callback, OnMetrics


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How one `fit` runs; `Trainer.fit` describes what it has in common with its arguments.

    Attributes:
        strict: refuse to run a program that deviates from its plan.
        sample_tokens: tokens of text to generate at the end, for language models.
        sample_prompt: what such a text begins with; None takes the beginning of a held-out text.
        sample_every: steps between two samples during training; None for one at the end.
        keep_micro: whether fewer processes keep the samples per device and microbatch.
        config: the config of the run, recorded in checkpoints; empty for runs from Python.
        tokenizer: the file of the data's tokenizer, which the run remembers for exports.
        files: files to write into the run folder before training, by name.
        on_checked: called when all checks have passed, before anything is written or compiled.
    """

    data: Data | None = None
    duration: Duration | None = None
    eval_data: Data | None = None
    eval_every: int | None = None
    eval_batches: int | None = None
    callbacks: Sequence[Callback] = ()
    run_dir: Path | None = None
    resume: str = "auto"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    progress: bool | None = None
    workers: int = 0
    prefetch: int = 4
    strict: bool = False
    profile: bool = False
    sample_tokens: int = 0
    sample_prompt: str | None = None
    sample_every: int | None = None
    project: str = "meshwright"
    keep_micro: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Recipe | None = None
    tokenizer: str | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    warnings: Sequence[str] = ()
    on_checked: Callable[[], None] = lambda: None

    def changed(self, **given: Any) -> FitSettings:
        """Return the settings with these arguments of `fit`; None leaves a setting as it is."""
        named = {name: value for name, value in given.items() if value is not None}
        return replace(self, **{name: _checked(name, value) for name, value in named.items()})

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.run_dir is not None and self.checkpoint.enabled


_KINDS: dict[str, tuple[type, str]] = {
    "checkpoint": (CheckpointConfig, "write mw.CheckpointConfig(every=100)"),
    "tracking": (TrackingConfig, "write mw.TrackingConfig(tensorboard=True)"),
    "progress": (bool, "write True or False, or leave it out"),
}


def _checked(name: str, value: Any) -> Any:
    """Return an argument of `fit` as the settings have it; refuse one of the wrong kind."""
    if name == "run_dir":
        return check_path(name, value).absolute()
    if name == "resume":
        return str(check_path(name, value))
    if name in ("eval_every", "eval_batches"):
        check_count(name, value)
    elif name in _KINDS:
        check_kind(name, value, *_KINDS[name])
    return value


def read_duration(
    steps: int | None,
    max_duration: str | None,
    epochs: float | None,
    default: Duration | None = None,
) -> Duration:
    """Return the length of a run, which must be given exactly once."""
    given = sum(each is not None for each in (steps, max_duration, epochs))
    if not given and default is not None:
        return default
    if given != 1:
        raise UserError(
            "the length of the run must be given exactly once",
            why=f"steps is {steps}, max_duration is {max_duration} and epochs is {epochs}",
            fix='write steps=1000, epochs=2, or max_duration="30min"',
        )
    if max_duration is not None:
        return parse_duration(max_duration)
    if epochs is not None:
        return parse_duration(f"{epochs}ep")
    check_count("steps", steps, least=0)
    return Duration(steps=steps)


def read_resume(resume: Any, restart: Any) -> Any:
    """Return where a run resumes from: auto, must, never or a path; None for the default."""
    check_kind("restart", restart, bool, "write restart=True to start over")
    return "never" if restart else resume


def read_callbacks(
    callbacks: Any, on_metrics: Callable[[int, dict[str, float]], None] | None
) -> list[Callback]:
    """Return all callbacks of a run, including the one for ``on_metrics``."""
    if not isinstance(callbacks, Sequence):
        raise wrong_kind("callbacks", callbacks, "write a list: callbacks=[mw.EarlyStopping(3)]")
    for callback in typing.cast(Sequence[Any], callbacks):
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else "MyCallback"
            fix = f"write an instance of a subclass of mw.Callback: callbacks=[{name}(…)]"
            raise wrong_kind("callbacks", callback, fix)
    if on_metrics is None:
        return list(callbacks)
    check_takes("on_metrics", on_metrics, ("step", "metrics"))
    return [*callbacks, OnMetrics(on_metrics)]
