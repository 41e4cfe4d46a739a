"""GRPO: learning from rewards of completions, relative to others of the same prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.tasks.task import Batch, Metrics, cross_entropy, read_field, weigh
from meshwright.weighted import Weighted

_CHOICES: dict[str, tuple[str, ...]] = {
    "scale_advantages": ("group", "batch", "none"),
    "mean": ("token", "sequence", "length"),
    "ratio": ("token", "sequence"),
    "kl": ("loss", "reward"),
}


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group-relative policy optimization, with its variants by settings.

    A batch holds completions, those of one prompt next to each other:

    - ``tokens`` [B, L]: prompt, completion and padding;
    - ``completion_mask`` [B, L-1]: which targets, one token ahead of the inputs, are completions;
    - ``sampler_log_probs`` [B, L-1]: their log-probabilities in the model that sampled them;
    - ``advantages`` [B], and ``counted`` [B]: whether a completion is part of the loss;
    - ``importance`` [B, L-1], if `importance_cap` is set: the model's probability divided by that
      in the distribution drawn from;
    - ``reference_log_probs`` [B, L-1], if `beta` is not 0;
    - ``rewards`` [B, F], ``scored``, ``truncated`` and ``varied`` [B]: for metrics only.

    Attributes:
        rewards: a reward function, or several, in a list or by name; see `mw.GRPO` in the docs.
        reward_weights: how much each reward counts; 1 each by default.
        reward_seconds: the most seconds of a call of a reward function.
        reward_processes: the most processes that call reward functions.
        num_generations: completions of each prompt, G.
        num_iterations: updates for each rollout.
        beta: weight of the KL divergence from the reference; 0 needs no reference.
        kl: whether the divergence is part of the loss (k3) or of the reward (k1).
        epsilon: how far ratios may fall below 1, and rise above it, before they are clipped.
        epsilon_high: how far they may rise; `epsilon` by default.
        dual_clip: the most that a ratio counts where the advantage is negative.
        scale_advantages: divide by the standard deviation of the group, of the batch, or not.
        leave_one_out: compare a reward with the mean of the others instead of that of all.
        mean: the loss is a mean over tokens, over sequences of means over their tokens, or over
            sequences of sums divided by `max_generation_steps`.
        ratio: of each token, or one of each sequence (GSPO).
        mask_truncated: leave completions that did not end out of the loss.
        importance_cap: the largest weight for tokens drawn from another distribution than the
            model's, by temperature, top-k or top-p; None uses no weights.
        max_prompt_length: the most tokens of a prompt.
        max_generation_steps: the most tokens of a completion.
        temperature: of sampling.
        top_k: sample from the k likeliest tokens; 0 means all.
        top_p: sample from the likeliest tokens that reach this probability together.
        eos_tokens: tokens that end a completion; by default those of the model.
        generation_batch_size: completions that are generated at a time; by default all.
        tokenizer: turns prompts into tokens; by default that of the data.
        reward_names: the names of the rewards, for metrics.
        vocab_size: tokens of synthetic batches are below it.
        context_length: the most tokens that the model takes, if it is known.
    """

    for_prompts: ClassVar[bool] = True
    """Its data are prompts, not rows of tokens."""

    rewards: Any = ()
    reward_weights: Sequence[float] | None = None
    reward_seconds: float = 10.0
    reward_processes: int = 2
    num_generations: int = 4
    num_iterations: int = 1
    beta: float = 0.08
    kl: Literal["loss", "reward"] = "loss"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    scale_advantages: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False
    mean: Literal["token", "sequence", "length"] = "token"
    ratio: Literal["token", "sequence"] = "token"
    mask_truncated: bool = False
    importance_cap: float | None = 2.0
    max_prompt_length: int = 256
    max_generation_steps: int = 512
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    eos_tokens: Sequence[int] | None = None
    generation_batch_size: int | None = None
    tokenizer: Any = None
    reward_names: Sequence[str] = ()
    vocab_size: int = 2
    context_length: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        ranges = {
            "num_generations": (self.num_generations >= 2, "2 or more: groups are compared"),
            "num_iterations": (self.num_iterations >= 1, "1 or more"),
            "max_prompt_length": (self.max_prompt_length >= 1, "1 or more"),
            "max_generation_steps": (self.max_generation_steps >= 1, "1 or more"),
            "beta": (0 <= self.beta < math.inf, "0 or more"),
            "epsilon": (0 < self.epsilon < 1, "between 0 and 1"),
            "epsilon_high": (self.epsilon_high is None or self.epsilon_high > 0, "more than 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "more than 1"),
            "importance_cap": (self.importance_cap is None or self.importance_cap > 0, "above 0"),
            "temperature": (self.temperature > 0, "more than 0: completions must differ"),
            "reward_seconds": (self.reward_seconds > 0, "more than 0"),
            "reward_processes": (self.reward_processes >= 1, "1 or more"),
        }
        for name, (valid, allowed) in ranges.items():
            if not valid:
                raise UserError(f"{name}={getattr(self, name)}", fix=f"write a number {allowed}")
        if self.context_length is not None and self.length > self.context_length + 1:
            raise UserError(
                f"prompts of {self.max_prompt_length:,} and completions of "
                f"{self.max_generation_steps:,} tokens do not fit the model",
                why=f"its context has {self.context_length:,} tokens",
                fix="lower max_prompt_length or max_generation_steps",
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"{name}={getattr(self, name)!r} is not known",
                    fix=f"write one of {', '.join(choices)}",
                )

    @property
    def length(self) -> int:
        """The tokens of a row: L."""
        return self.max_prompt_length + self.max_generation_steps

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference are needed."""
        return self.beta > 0

    def loss(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return the loss, and what happened as metrics."""
        new = token_log_probs(model, batch)
        mask = read_field(batch, "completion_mask").astype(new.dtype)
        counted = read_field(batch, "counted").astype(new.dtype)
        sampler = read_field(batch, "sampler_log_probs").astype(new.dtype)
        lengths = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
        weights = jnp.ones_like(new)
        if self.importance_cap is not None:
            weights = jnp.minimum(read_field(batch, "importance"), self.importance_cap)
            weights = weights.astype(new.dtype)
        log_ratio = (new - sampler) * mask
        if self.ratio == "sequence":
            log_ratio = jnp.broadcast_to(log_ratio.sum(axis=1, keepdims=True) / lengths, new.shape)
        ratio = jnp.exp(log_ratio)
        advantage = read_field(batch, "advantages").astype(new.dtype)[:, None]
        objective, low, high = self._clipped(ratio, advantage)
        losses = -objective * weights
        taken = mask * counted[:, None]
        metrics = self._metrics(batch, new, mask, sampler)
        metrics["clipped_low"], metrics["clipped_high"] = weigh(low, taken), weigh(high, taken)
        if self.needs_reference:
            away = (read_field(batch, "reference_log_probs").astype(new.dtype) - new) * mask
            k3 = jnp.exp(away) - away - 1
            metrics["kl"] = weigh(k3, mask)
            if self.kl == "loss":
                losses = losses + self.beta * k3 * weights
        if self.mean == "token":
            return weigh(losses, taken), metrics
        if self.mean == "sequence":
            return weigh((losses * mask).sum(axis=1) / lengths[:, 0], counted), metrics
        each = (losses * mask).sum(axis=1) / self.max_generation_steps
        return weigh(each, counted), metrics

    def _clipped(self, ratio: Array, advantage: Array) -> tuple[Array, Array, Array]:
        """Return the clipped objective of each token, and whether it was clipped below or above."""
        highest = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        plain = ratio * advantage
        held = jnp.clip(ratio, 1 - self.epsilon, highest) * advantage
        objective = jnp.minimum(plain, held)
        if self.dual_clip is not None:
            floor = self.dual_clip * advantage
            objective = jnp.where(advantage < 0, jnp.maximum(objective, floor), objective)
        low = (ratio < 1 - self.epsilon) & (advantage < 0)
        high = (ratio > highest) & (advantage > 0)
        return objective, low, high

    def _metrics(self, batch: Batch, new: Array, mask: Array, sampler: Array) -> Metrics:
        """Return what happened in the rollout, and how sampler and trainer differ."""
        rewards, scored = read_field(batch, "rewards"), read_field(batch, "scored")
        ones = jnp.ones_like(scored)
        apart = jax.lax.stop_gradient(new - sampler) * mask
        names = self.reward_names or [str(n) for n in range(rewards.shape[1])]
        own = np.array(self.reward_weights or [1.0] * rewards.shape[1], np.float32)
        found = {f"reward/{name}": weigh(rewards[:, n], scored) for n, name in enumerate(names)}
        # Estimated from the sampled tokens alone, which needs no second pass over the logits.
        drawn = mask
        if self.importance_cap is not None:
            drawn = mask * jnp.minimum(batch["importance"], self.importance_cap)
        return {
            "reward": weigh(rewards @ own, scored),
            **(found if len(names) > 1 else {}),
            "completion_tokens": weigh(mask.sum(axis=1), ones),
            "truncated": weigh(read_field(batch, "truncated"), ones),
            "zero_variance": weigh(1 - read_field(batch, "varied"), ones),
            "reward_failed": weigh(1 - scored, ones),
            "entropy": weigh(-sampler, drawn),
            "mismatch": weigh(jnp.exp(apart) - apart - 1, mask),
        }

    def fields(self, batch_size: int, rewards: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and type of every field of a batch."""
        targets = (batch_size, self.length - 1)
        sizes: dict[str, tuple[int, ...]] = {"completion_mask": targets}
        sizes["sampler_log_probs"] = targets
        sizes |= {"importance": targets} if self.importance_cap is not None else {}
        sizes |= {"reference_log_probs": targets} if self.needs_reference else {}
        sizes |= dict.fromkeys(
            ("advantages", "counted", "scored", "truncated", "varied"), (batch_size,)
        )
        sizes["rewards"] = (batch_size, rewards)
        floats = {name: (shape, np.float32) for name, shape in sizes.items()}
        return {"tokens": ((batch_size, self.length), np.int32), **floats}

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch."""
        fields = self.fields(batch_size, max(1, len(self.reward_names)))
        return {name: jax.ShapeDtypeStruct(*each) for name, each in fields.items()}

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, NDArray[Any]]:
        """Return random completions with random advantages, of the shapes of real ones."""
        random = np.random.default_rng(seed)
        fields = self.fields(batch_size, max(1, len(self.reward_names)))
        made = {name: np.ones(shape, dtype) for name, (shape, dtype) in fields.items()}
        made["tokens"] = random.integers(self.vocab_size, size=fields["tokens"][0]).astype(np.int32)
        made["completion_mask"][:, : self.max_prompt_length - 1] = 0
        for name in ("sampler_log_probs", "reference_log_probs"):
            if name in made:
                made[name] = np.full_like(made[name], -math.log(max(self.vocab_size, 2)))
        made["advantages"] = random.standard_normal(batch_size).astype(np.float32)
        return made


def token_log_probs(model: Callable[..., Array], batch: Batch) -> Array:
    """Return the log-probability of each target: [B, L-1]."""
    tokens = read_field(batch, "tokens")
    return -cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def group_advantages(
    rewards: NDArray[np.float64], *, scale: str = "group", leave_one_out: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compare the rewards of each group.

    Args:
        rewards: [groups, G]; NaN for a completion without a reward, which nothing depends on.
        scale: divide by the standard deviation of the ``group``, of the ``batch`` or by ``none``.
        leave_one_out: compare with the mean of the others.

    Returns:
        The advantages [groups, G], 0 where there are none, and whether the group of each
        completion has rewards that differ [groups]. Groups that have not are in no deviation.
    """
    known = np.isfinite(rewards)
    count = known.sum(axis=1, keepdims=True)
    filled = np.where(known, rewards, 0.0)
    mean = filled.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    lowest = np.where(known, rewards, np.inf).min(axis=1)
    varied = (count[:, 0] > 1) & (np.where(known, rewards, -np.inf).max(axis=1) > lowest)
    taken = known & varied[:, None]
    apart = np.where(taken, rewards - mean, 0.0)
    if scale == "group":
        deviation = np.sqrt((apart**2).sum(axis=1, keepdims=True) / np.maximum(count, 1))
    elif scale == "batch":
        whole = rewards[taken]
        deviation = np.full_like(mean, whole.std() if whole.size else 1.0)
    else:
        deviation = np.ones_like(mean)
    if leave_one_out:
        # R - mean of the others = (R - mean of all) · n / (n - 1)
        apart = apart * count / np.maximum(count - 1, 1)
    return apart / np.where(deviation > 0, deviation, 1.0), varied
