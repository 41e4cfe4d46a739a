"""A rollout: the current model completes prompts, rewards score them, and a batch comes of it."""

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.prompts import PROMPT, as_prompts
from meshwright.data.protocols import Data, HostBatch
from meshwright.data.rollout_data import RolloutData
from meshwright.data.user_data import as_data
from meshwright.errors import Setting, UserError
from meshwright.generation.text_settings import HALF
from meshwright.generation.token_loop import Ended, Row
from meshwright.program.trace.adapters import PREFIX
from meshwright.rewards.reward_set import RewardSet, read_rewards
from meshwright.runtime.activity import activity
from meshwright.step.state import TrainState
from meshwright.tasks.grpo import GRPO, group_advantages, reference_log_probs, token_log_probs
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.evaluating.evaluation import EVAL_SAMPLES, predict
from meshwright.trainer.programs import Programs
from meshwright.trainer.rollouts.completer import Completer, Report, json_number, prompts_of
from meshwright.trainer.rollouts.rollout_files import RolloutFiles


@dataclass
class Rollouts:
    """Makes the batches of a training that learns from rewards.

    Attributes:
        data: the prompts, and the task.
        current: returns the state after the last step.
        initial: makes the state that training started from, for the reference.
        seed: decides the samples, with the number of the prompt, of the sample and the position.
        run_dir: the run folder; None writes nothing.
        resumed: the folder of the run whose checkpoint is resumed from.
        hf_files: files of the folder that the model is from, by name.
        log_every: steps between two lines of metrics.
        tracker: gets the times of rollouts, and what goes wrong.
    """

    data: RolloutData
    programs: Programs
    current: Callable[[], TrainState]
    initial: Callable[[], TrainState]
    seed: int
    run_dir: Path | None = None
    run: str = ""
    resumed: Path | None = None
    hf_files: Mapping[str, str] = field(default_factory=dict[str, str])
    log_every: int = 1
    tracker: Tracker = field(default_factory=Tracker)
    _reference: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        task: GRPO = self.data.task
        self.task = task
        self.rewards: RewardSet = read_rewards(
            task.rewards,
            task.reward_weights,
            seconds=task.reward_seconds,
            processes=task.reward_processes,
        )
        self.files = RolloutFiles(
            self.run_dir, self.run, self.rewards.names, task.num_iterations, self.resumed
        )
        self.completer = Completer(
            self.rewards, self.data.tokenizer, self.hf_files.get, task.eos_tokens
        )
        self.data.make, self.data.resume = self, self.files.kept

    def check(self, prompts: Data) -> None:
        """Refuse batches of parts of groups, prompts that are too long, and columns that lack."""
        self.data.num_prompts(self.programs.assembled.plan.batch.global_batch_size)
        count = prompts.num_samples or 0
        size = min(1024, count)
        for step in range(-(-count // max(size, 1))):
            columns, ids = prompts.batch(step, size), prompts.ids(step, size)
            self.rewards.check(columns)
            for n, prompt in enumerate(prompts_of(columns)):
                self._check_length(step * size + n if ids is None else int(ids[n]), prompt)

    def __call__(self, number: int, batch_size: int) -> HostBatch:
        """Return the batch of a rollout."""
        seconds: dict[str, float] = {}
        step = number * self.task.num_iterations + 1
        with activity(f"rollout for step {step}", afterwards=False) as report:
            columns = self.data.prompts.batch(number, self.data.num_prompts(batch_size))
            with _timed(seconds, "rollout_seconds"):
                rows = self._complete(
                    self.current(),
                    columns,
                    report,
                    first=number * len(prompts_of(columns)),
                    samples=self.task.num_generations,
                    temperature=self.task.temperature,
                    top_k=self.task.top_k,
                    top_p=self.task.top_p,
                )
            with _timed(seconds, "reward_seconds"):
                report("rewards")
                values = self._values(number, columns, rows)
            batch = self._batch(rows)

            def finish() -> None:
                self._learn_from(batch, values)
                self._write(number, columns, rows, batch, values)

            with ThreadPoolExecutor(1, "completions") as thread:
                # While devices compute, unless rewards depend on what they compute.
                written = None if self.task.rewards_read_reference else thread.submit(finish)
                with _timed(seconds, "log_prob_seconds"):
                    if self.task.needs_reference:
                        report("log-probabilities of the reference")
                        batch["reference_log_probs"] = self._reference_log_probs(batch)
                finish() if written is None else written.result()
        if number == 0 and not batch["counted"].any():
            text = f"{_why_nothing_counts(batch)}, so the first step learns nothing"
            self.tracker.event("warning", 0, text, {})
        if self.task.num_iterations > 1:
            self.files.keep(number, batch)
        tokens = sum(len(row.tokens) for row in rows)
        seconds["rollout_tokens_per_second"] = tokens / max(seconds["rollout_seconds"], 1e-9)
        if number % max(1, self.log_every // self.task.num_iterations) == 0:
            self.tracker.log("rollout", step, seconds)
        return batch

    def evaluate(self, state: TrainState, prompts: Data, batches: int | None) -> dict[str, float]:
        """Return the mean rewards of held-out prompts, each completed greedily."""
        count = self.num_evaluated(prompts, batches)
        with activity("evaluating", afterwards=False) as report:
            columns = prompts.batch(0, count)
            rows = self._complete(state, columns, report, temperature=0.0)
            _, scored = self.completer.score(columns, rows)
        known = np.isfinite(scored.values).all(axis=1)
        means = scored.values[known].mean(axis=0) if known.any() else scored.values.mean(axis=0)
        reward = float(self.rewards.total(means[None])[0])
        each = {f"reward/{n}": float(v) for n, v in zip(self.rewards.names, means, strict=True)}
        found = {"loss": -reward, "reward": reward, **(each if len(each) > 1 else {})}
        return {**found, "reward_failed": float(1 - known.mean()), EVAL_SAMPLES: count}

    def num_evaluated(self, prompts: Data, batches: int | None) -> int:
        """Return how many prompts are in this many batches of training; all of them for None."""
        total, size = prompts.num_samples or 0, self.programs.assembled.plan.batch.global_batch_size
        return min(total, batches * size) if batches else total

    def release(self) -> None:
        """Drop the copy of the reference and end the processes of rewards, until the next use."""
        self._reference = []
        self.rewards.processes.close()

    def _complete(
        self, state: TrainState, columns: Any, report: Report, samples: int = 1, **drawn: Any
    ) -> list[Row]:
        """Complete prompts with the model of a state, on the training mesh."""
        task, assembled = self.task, self.programs.assembled
        return self.completer.complete(
            assembled.model(state),
            columns,
            report,
            samples=samples,
            max_new_tokens=task.max_generation_steps,
            seed=self.seed,
            batch_size=task.generation_batch_size or len(prompts_of(columns)) * samples,
            context_length=task.most_tokens,
            dtype=HALF.get(assembled.plan.precision),
            **drawn,
        )

    def _check_length(self, number: int, prompt: Any) -> None:
        count, most = len(self.completer.encode(prompt)), self.task.max_prompt_length
        if not count:
            raise UserError(
                f"prompt {number} has no tokens",
                why="a completion needs at least one token to follow",
                fix="leave the prompt out, or write one",
            )
        if count > most:
            raise UserError(
                f"prompt {number} has {count:,} tokens: {str(prompt)[:60]!r}",
                why=f"prompts may have {most:,} ({Setting('generation.max_prompt_length', most)})",
                fix=f"write {Setting('generation.max_prompt_length', count)}, or leave the prompt "
                "out",
            )

    def _values(self, number: int, columns: Any, rows: list[Row]) -> NDArray[np.float64]:
        """Return the rewards [B, F]: those of an earlier attempt, or new ones."""
        stored = self.files.rewards(number, [row.tokens for row in rows])
        if stored is not None:
            return np.array(stored, np.float64)
        _, scored = self.completer.score(columns, rows)
        for text in scored.warnings():
            self.tracker.event("warning", number * self.task.num_iterations, text, {})
        scored.check()
        return scored.values

    def _batch(self, rows: list[Row]) -> HostBatch:
        """Return what rows say by themselves: tokens, masks and log-probabilities."""
        fields = self.task.fields(len(rows), len(self.rewards.names))
        batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in fields.items()}
        if "importance" in batch:
            batch["importance"][:] = 1
        for n, row in enumerate(rows):
            begin, count = len(row.prompt.tokens), len(row.tokens)
            batch["tokens"][n, : begin + count] = [*row.prompt.tokens, *row.tokens]
            own = slice(begin - 1, begin - 1 + count)
            batch["completion_mask"][n, own] = 1
            batch["sampler_log_probs"][n, own] = row.log_probs
            if "importance" in batch:
                apart = np.subtract(row.log_probs, row.drawn_log_probs)
                batch["importance"][n, own] = np.exp(np.minimum(apart, 50.0))
            batch["truncated"][n] = row.ended in (Ended.MAX_NEW_TOKENS, Ended.CONTEXT)
        return batch

    def _learn_from(self, batch: HostBatch, values: NDArray[np.float64]) -> None:
        """Add rewards, advantages, and which completions count."""
        task = self.task
        total = self.rewards.total(values)
        known = np.isfinite(total)
        groups = total.reshape(-1, task.num_generations)
        _, varied = group_advantages(groups)
        if task.rewards_read_reference:
            apart = batch["sampler_log_probs"] - batch["reference_log_probs"]
            apart = (apart * batch["completion_mask"]).sum(axis=1, dtype=np.float64)
            groups = (total - task.beta * apart).reshape(groups.shape)
        # Whether a group has anything to teach is decided by its rewards alone.
        groups = np.where(varied[:, None], groups, np.nan)
        advantages, _ = group_advantages(
            groups, scale=task.scale_advantages, leave_one_out=task.leave_one_out
        )
        batch["advantages"][:] = advantages.ravel()
        batch["rewards"][:] = np.where(known[:, None], values, 0.0)
        batch["scored"][:] = known
        batch["varied"][:] = np.repeat(varied, task.num_generations)
        batch["counted"][:] = known & (batch["varied"] > 0)
        if task.mask_truncated:
            batch["counted"] *= 1 - batch["truncated"]

    def _reference_log_probs(self, batch: HostBatch) -> NDArray[np.float32]:
        state, leaves = self.current(), self.programs.assembled.model_leaves.leaves
        log_probs = reference_log_probs
        if not all(leaf.path.startswith(PREFIX) for leaf in leaves if leaf.role == "param"):
            # Nothing else changes in training, so that weights that are not trained have no copy.
            self._reference = self._reference or self.initial().params
            state, log_probs = replace(state, params=self._reference, optimizer=[]), token_log_probs
        found = predict(self.programs, state, as_data({"tokens": batch["tokens"]}), log_probs)
        return np.where(batch["completion_mask"] > 0, found, 0).astype(np.float32)

    def _write(
        self, number: int, columns: Any, rows: list[Row], batch: HostBatch, values: Any
    ) -> None:
        total, names = self.rewards.total(values), self.rewards.names
        others = {name: each for name, each in columns.items() if name != PROMPT}
        prompts = np.repeat(np.arange(len(prompts_of(columns))), self.task.num_generations)
        lines = [
            {
                "prompt": _plain(prompts_of(columns)[prompts[n]]),
                "columns": {name: _plain(each[prompts[n]]) for name, each in others.items()},
                "sample": row.sample,
                "completion": row.tokens if row.text is None else row.text,
                "tokens": len(row.tokens),
                "ended": str(row.ended),
                "reward": json_number(total[n]),
                "rewards": {name: json_number(v) for name, v in zip(names, values[n], strict=True)},
                "advantage": float(batch["advantages"][n]),
            }
            for n, row in enumerate(rows)
        ]
        self.files.write(number, lines, [row.tokens for row in rows])


def _why_nothing_counts(batch: HostBatch) -> str:
    """Return why no completion of a batch is part of the loss, and what to do about it."""
    if batch["varied"].any():
        masked, longer = Setting("grpo.mask_truncated", True), "generation.max_generation_steps"
        return f"{masked} leaves out all completions that could count (raise {Setting(longer)})"
    if lost := int((batch["scored"] == 0).sum()):
        return (
            f"rewards failed for {lost} of {len(batch['scored'])} completions, and no prompt has "
            "two others with different rewards"
        )
    return (
        "the completions of each prompt have the same reward (start from a model that is right "
        "now and then, or reward parts of an answer)"
    )


def held_out_prompts(given: Any, task: GRPO, seed: int) -> Data:
    """Return prompts in any form as data to evaluate on."""
    return as_data(as_prompts(given, task.tokenizer), seed).for_one_pass(in_order=True)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Generator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


@dataclass(frozen=True)
class RewardEvaluator:
    """Evaluates training states by the rewards of held-out prompts, completed greedily.

    The limit is the most batches of an evaluation; None for all prompts.
    """

    rollouts: Rollouts
    data: Data
    limit: int | None = None

    def __call__(self, state: TrainState, warn: Callable[[str], None]) -> dict[str, float]:
        """Return the mean rewards; the loss is the reward with the sign changed."""
        return self.rollouts.evaluate(state, self.data, self.limit)

    def compile_ahead(self) -> None:
        """Do nothing: completions compile as they grow."""

    def note(self) -> str:
        """Say how many prompts are used where that is a choice; empty if all are."""
        total = self.data.num_samples or 0
        count = self.rollouts.num_evaluated(self.data, self.limit)
        return "" if count == total else f"each evaluation uses {count:,} of {total:,} prompts"
