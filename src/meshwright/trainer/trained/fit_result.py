"""The result of a training run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.checkpoint import FOLDER, CheckpointMetadata, CheckpointStore
from meshwright.checkpoint.export import ArraysByPath
from meshwright.config.argument_checks import check_path
from meshwright.data.elements import Expected
from meshwright.data.rollout_data import RolloutData
from meshwright.data.user_data import as_data
from meshwright.errors import EnvironmentProblem, UserError, first_line
from meshwright.generation.generate import generate
from meshwright.generation.text_settings import HALF, read_text_settings
from meshwright.generation.token_loop import Generated
from meshwright.processes import broadcast, is_main
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.text.units import counted
from meshwright.tracking.log_lines import levels_inside
from meshwright.trainer.evaluating.evaluation import Evaluator, predict, prediction_inputs
from meshwright.trainer.programs import Programs
from meshwright.trainer.rollouts.rollout import Rollouts, held_out_prompts
from meshwright.trainer.run_dir import write_files
from meshwright.trainer.run_progress import Stop, StopReason
from meshwright.trainer.trained.base_weights import keep_base
from meshwright.weights.kept import HF_FOLDER


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a training run.

    Attributes:
        losses: the mean loss of every logged step, by its number from 1.
        eval: the metrics of every evaluation, by steps done.
        steps: steps done, including those before a resume.
        steps_before: those of them that were done before, by the run this one resumed.
        seconds: duration, including compilation.
        stop: why the run ended: ``stop.reason`` is a `StopReason`, ``stop.text`` says it.
        state: the final state.
        programs: the compiled programs of the step.
        metadata: what a checkpoint of the final state records about the run.
        run_dir: the run folder; None for a run without one.
        hf_files: what an export to Hugging Face's format needs, by file name.
        extra: further results, such as a sample of text.
        tokenizer: that of the data; None if it is not known.
        rewards: the mean reward of every logged step, by its number, if it learned from rewards.
        rollouts: what completes prompts and scores them, of a run that learned from rewards.
        goodput: the share of the time since the start, with earlier attempts of the same launch,
            that went into steps whose results were kept; None if the result was restored.
        attempts: how often the launcher has started the processes.
        skipped: steps since ``steps_before`` that changed nothing, as they were not finite.
    """

    losses: dict[int, float]
    eval: dict[int, dict[str, float]]
    steps: int
    seconds: float
    stop: Stop
    state: TrainState
    programs: Programs
    metadata: CheckpointMetadata
    run_dir: Path | None = None
    hf_files: Mapping[str, str] = field(default_factory=dict[str, str])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps_before: int = 0
    goodput: float | None = None
    attempts: int = 1
    skipped: int = 0
    tokenizer: Any = None
    rewards: Mapping[int, float] = field(default_factory=dict[int, float])
    rollouts: Rollouts | None = None

    def __repr__(self) -> str:
        """Show how the run went; states and programs would fill pages."""
        last = list(self.losses.values())[-1:]
        shown = f", loss {last[0]:.4f}" if last else ""
        return f"FitResult({self.steps} steps{shown}, {self.seconds:.1f} s, {self.stopped})"

    def __str__(self) -> str:
        """Return how the run went, in a line or two."""
        plan, done = self.assembled.plan, counted(self.steps, "step")
        if self.stop.reason is StopReason.RESTORED:
            return f"{done}, {self.stopped}"
        new = self.steps - self.steps_before - self.skipped
        samples = f" of {counted(plan.batch.global_batch_size, 'sample')}" if new else ""
        ended = (
            f"trained {counted(new, 'step') if new else 'nothing'}"
            f"{f' ({done} in all)' if self.steps_before else ''}{samples}"
            f"{f' and skipped {self.skipped}' if self.skipped else ''} on "
            f"{counted(plan.num_devices, 'device')} in {self.seconds:.0f} s: {self.stopped}"
        )
        held_out = [own["reward"] for own in self.eval.values() if "reward" in own]
        # Losses of groups say nothing across steps.
        if self.rewards:
            values = [_first_and_last("reward", list(self.rewards.values()))]
            values += [_first_and_last("of held-out prompts", held_out)] if held_out else []
        else:
            losses = list(self.losses.values())
            values = [_first_and_last("loss", losses)] if losses else []
            values += [] if self.eval_loss is None else [f"held out {self.eval_loss:.4f}"]
        return "\n".join(filter(None, (ended, ", ".join(values))))

    @property
    def stopped(self) -> str:
        """Why the run ended, as text."""
        return self.stop.text

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run; with a run_dir, the state was saved."""
        return self.stop.interrupted

    @property
    def assembled(self) -> Assembled:
        """The step and what it was made from."""
        return self.programs.assembled

    @cached_property
    def model(self) -> Any:
        """The trained model, as the user wrote it, in evaluation mode.

        It is the same object every time. `model.train()` sets it to training mode, with dropout.
        """
        return self.assembled.model(self.state)

    def averaged(self) -> FitResult:
        """Return the same with the moving average of the parameters (``ema_decay``)."""
        return replace(self, state=self.assembled.averaged(self.state))

    @property
    def params(self) -> dict[str, Any]:
        """The trained parameters by canonical path, such as ``blocks.0.mlp.up.kernel``."""
        return ArraysByPath(self.assembled.canonical_params(self.state.params))

    def host_arrays(self) -> dict[str, Any]:
        """Return parameters and statistics by canonical path, as NumPy arrays."""
        floats = {
            path: array
            for path, array in self.assembled.canonical(self.state).items()
            if jnp.issubdtype(array.dtype, jnp.floating)
        }
        whole = NamedSharding(self.assembled.mesh, PartitionSpec())
        return jax.device_get(jax.jit(lambda arrays: arrays, out_shardings=whole)(floats))

    def save(self, path: str | Path) -> None:
        """Save the final state as a checkpoint that `fit` resumes from and `load_model` reads.

        Args:
            path: a folder for it, without checkpoints.
        """
        folder = check_path("path", path).absolute() / FOLDER
        if broadcast(is_main() and folder.is_dir() and any(folder.iterdir())):
            raise UserError(
                f"{path} already holds checkpoints", fix="name another folder, or remove this one"
            )
        store = CheckpointStore(folder)
        store.save(self.programs.form.copy(self.state), self.metadata)
        saved = store.close()
        if saved is not None and saved.error is not None:
            raise EnvironmentProblem(
                f"the state could not be saved in {path}", why=first_line(saved.error)
            )
        write_files(folder.parent / HF_FOLDER, self.hf_files)
        keep_base(
            folder.parent, self.assembled, self.programs.form, self.state, self.metadata, None
        )

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation; None without evaluation."""
        return self.eval[max(self.eval)]["loss"] if self.eval else None

    def evaluate(self, data: Any, *, eval_batches: int | None = None) -> dict[str, float]:
        """Evaluate the trained model, as training does on ``eval_data``.

        Args:
            data: samples in any form `Trainer.fit` takes, or prompts; each counts exactly once.
            eval_batches: the most batches to use, each as large as a training batch; None for
                all samples.

        Returns:
            The mean loss and metrics, or rewards, and the number of samples as ``eval_samples``.
        """
        if self.rollouts is not None:
            prompts = held_out_prompts(data, self.rollouts.task, self.metadata.seed)
            self.rollouts.check(prompts)
            try:
                return self.rollouts.evaluate(self.state, prompts, eval_batches)
            finally:
                self.rollouts.release()
        expected = Expected(like=self.programs.batch_like, training=False)
        given = as_data(data, self.metadata.seed, expected=expected)
        evaluator = Evaluator(self.programs, given, limit=eval_batches)
        return evaluator(
            self.state, lambda message: warnings.warn(message, stacklevel=levels_inside())
        )

    def predict(self, data: Any, fn: Callable[[Any, Any], Any] | None = None) -> Any:
        """Apply the trained model, in evaluation mode, to every sample in order.

        Args:
            data: an array of samples, or samples in any form `Trainer.fit` takes.
            fn: ``fn(model, batch)``, which returns arrays with one row per sample; by default
                the model itself, for data of a single array.

        Returns:
            What ``fn`` returns, as NumPy arrays of all samples.
        """
        given, function = prediction_inputs(data, fn, self.programs.batch_like)
        return predict(self.programs, self.state, given, function)

    def generate(self, prompts: Any = (), **settings: Any) -> Generated:
        """Continue prompts with the trained model, on the mesh that it was trained on.

        Args:
            prompts: texts or token ids.
            settings: arguments of `mw.generate`. The tokenizer is that of the run, and the weights
                are in the format that the run computed in, unless they say otherwise.
        """
        kept = None if self.run_dir is None else read_text_settings(self.run_dir)
        own = kept if kept and kept.tokenizer else self.tokenizer or kept
        settings.setdefault("tokenizer", own)
        settings.setdefault("dtype", HALF.get(self.assembled.plan.precision))
        return generate(self.model, prompts, **settings)

    def summary(self) -> dict[str, Any]:
        """Return the content of result.json."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            **summarize(self.losses, self.eval),
            "seconds": self.seconds,
            "goodput": self.goodput,
            "attempts": self.attempts,
            "stopped": self.stopped,
            **self.extra,
        }


def with_rollouts(result: FitResult, data: RolloutData, seed: int) -> FitResult:
    """Return a result that can complete prompts and score them."""
    made = Rollouts(
        data, result.programs, lambda: result.state, lambda: result.state, seed,
        hf_files=result.hf_files,
    )  # fmt: skip
    return replace(result, rollouts=made)


def _first_and_last(name: str, values: list[float]) -> str:
    return f"{name} {' → '.join(f'{value:.4f}' for value in values[:1] + values[1:][-1:])}"


def summarize(
    losses: Mapping[int, float], evaluations: Mapping[int, Mapping[str, float]]
) -> dict[str, float | None]:
    """Return the first and the last loss, and that of the last evaluation; None for none."""
    values = list(losses.values())
    return {
        "first_loss": values[0] if values else None,
        "final_loss": values[-1] if values else None,
        "eval_loss": evaluations[max(evaluations)]["loss"] if evaluations else None,
    }
