"""The specification of a training run: frozen records of what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config.duration import Duration
from meshwright.config.schema import CheckpointConfig, TrackingConfig
from meshwright.data.protocols import Data
from meshwright.planner.estimate.estimator import Estimator
from meshwright.program.trace.traced_loss import Loss
from meshwright.runtime.interrupt import Interrupt
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.incidents.not_finite import NonfinitePolicy
from meshwright.trainer.programs import Programs
from meshwright.trainer.resuming.resume import ResumePoint


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """When to evaluate, and on what.

    Attributes:
        data: held-out data; None for no evaluation.
        loss: what evaluations compute instead of the training loss; None for the same.
        every: updates between two evaluations; None for a single one at the end.
        batches: the most batches one evaluation uses; None for all samples.
    """

    data: Data | None = None
    loss: Loss | None = None
    every: int | None = None
    batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadingSpec:
    """How batches are read.

    Attributes:
        workers: processes that read data; 0 reads in threads.
        prefetch: batches to read ahead.
    """

    workers: int = 0
    prefetch: int = 4


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """What a run writes and shows.

    Attributes:
        run_dir: the run folder; None for a run that writes nothing.
        files: files to write into the run folder before training, by name.
        hf_files: what to remember for exports to Hugging Face's format, by name.
        project: the name of the project.
        name: the name of the run; None for the end of the run folder's path.
        log_every: updates between two logged updates.
        tracking: trackers besides the files in the run folder.
        progress: whether to show progress; see `make_trackers`.
        checkpoint: when to save checkpoints, and how many to keep.
        profile: profile a few updates of the run.
    """

    run_dir: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    hf_files: Mapping[str, str] = field(default_factory=dict[str, str])
    project: str = "meshwright"
    name: str | None = None
    log_every: int = 10
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    progress: bool | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: bool = False


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A training run as it was asked for.

    Attributes:
        assembled: the step.
        loss: the loss the step was made from.
        batch: a global batch, as arrays or shapes.
        data: the training data.
        duration: how long to train.
        seed: the seed of the run.
        initial_state: returns the state to start from without a checkpoint.
        weights: where the weights of that state come from, in one line; empty if random.
        updates_done: the updates of that state.
        resume_point: the checkpoint to resume from.
        evaluation: when to evaluate, and on what.
        loading: how batches are read.
        output: what the run writes and shows.
        callbacks: the user's callbacks.
        config: the full config, recorded in checkpoints; empty for runs started from Python.
        learning_rate: the learning rate by update, if it is known.
        nonfinite: what to do about updates that are not finite.
        strict: refuse to run a program that deviates from its plan.
        extra_results: returns further results for result.json from the final state.
        warnings: further warnings to show at the start.
        settings: further settings that must be the same in every process.
        code: the user's model, loss and callbacks, whose files must be the same in every process.
        interrupt: watches signals already; by default they are watched during training only.
        programs: programs that are compiled already; None for none.
        estimator: returns what predicts the memory of plans; None without predictions.
    """

    assembled: Assembled
    loss: Loss
    batch: Any
    data: Data
    duration: Duration
    seed: int
    initial_state: Callable[[], TrainState]
    weights: str = ""
    updates_done: int = 0
    resume_point: ResumePoint | None = None
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    loading: LoadingSpec = field(default_factory=LoadingSpec)
    output: OutputSpec = field(default_factory=OutputSpec)
    callbacks: Sequence[Callback] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    learning_rate: Callable[[int], Any] | None = None
    nonfinite: NonfinitePolicy = field(default_factory=NonfinitePolicy)
    strict: bool = False
    extra_results: Callable[[TrainState], Mapping[str, Any]] = lambda _: {}
    warnings: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    code: Sequence[Any] = ()
    interrupt: Interrupt | None = None
    programs: Programs | None = None
    estimator: Callable[[], Estimator] | None = None
