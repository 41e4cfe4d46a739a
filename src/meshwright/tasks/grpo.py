"""GRPO: learning from rewards of completions, relative to others of the same prompt."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from pydantic import model_validator

from meshwright.config.reward_sections import GenerationConfig, GrpoConfig
from meshwright.errors import Setting, UserError
from meshwright.program.trace.adapters import reference
from meshwright.tasks.task import Batch, Metrics, cross_entropy, read_field, weigh
from meshwright.weighted import Weighted


class GRPO(GrpoConfig, GenerationConfig):
    """Group-relative policy optimization: a model learns from rewards of its completions.

    Its settings are those of the config's sections ``grpo`` and ``generation``, by the same names,
    such as ``num_generations``, ``beta`` and ``max_prompt_length``.

    Attributes:
        rewards: a reward function, or several, in a list or by name.
        tokenizer: turns prompts into tokens; by default that of the data.
        reward_names: the names of the rewards, for metrics; by default those of the functions.
        vocab_size: tokens of synthetic batches are below it.
        context_length: the most tokens that the model takes, if it is known.

    A batch holds completions, those of one prompt next to each other:

    - ``tokens`` [B, L]: prompt, completion and padding; the model reads all but the last one, which
      is padding unless the model's context is too short for that;
    - ``completion_mask`` [B, L-1]: which targets, one token ahead of the inputs, are completions;
    - ``sampler_log_probs`` [B, L-1]: their log-probabilities in the model that sampled them;
    - ``advantages`` [B], and ``counted`` [B]: whether a completion is part of the loss;
    - ``importance`` [B, L-1], if `importance_cap` is set: the model's probability divided by that
      in the distribution drawn from;
    - ``reference_log_probs`` [B, L-1], if `beta` is not 0;
    - ``rewards`` [B, F], ``scored``, ``truncated`` and ``varied`` [B]: for metrics only.
    """

    for_prompts: ClassVar[bool] = True
    """Its data are prompts, not rows of tokens."""

    rewards: Any = ()
    tokenizer: Any = None
    reward_names: tuple[str, ...] = ()
    vocab_size: int = 2
    context_length: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _weights_in_order(cls, given: Any) -> Any:
        rewards, weights = (given.get(name) for name in ("rewards", "reward_weights"))
        if not isinstance(weights, Mapping):
            return given
        if not isinstance(rewards, Mapping) or set(rewards) != set(weights):
            named = ", ".join(rewards) if isinstance(rewards, Mapping) else "not given by name"
            raise UserError(
                "the reward weights do not have the names of the rewards",
                why=f"the weights are for {', '.join(weights)}; the rewards are {named}",
                fix="give a dict of rewards and one of weights with the same names, or lists",
            )
        return {**given, "reward_weights": [weights[name] for name in rewards]}

    @model_validator(mode="after")
    def _fits_the_model(self) -> Self:
        if self.context_length is not None and self.most_tokens > self.context_length + 1:
            raise self.too_long(f"its context has {self.context_length:,} tokens")
        return self

    def too_long(self, why: str) -> UserError:
        """Return the error for a model that takes fewer tokens."""
        names = ("generation.max_prompt_length", "generation.max_generation_steps")
        return UserError(
            f"prompts of {self.max_prompt_length:,} and completions of "
            f"{self.max_generation_steps:,} tokens do not fit the model",
            why=why,
            fix="lower {} or {}".format(*map(Setting, names)),
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return self.max_prompt_length + self.max_generation_steps

    @property
    def length(self) -> int:
        """The tokens of a row: L. The model reads all but the last one."""
        length = self.most_tokens + 1
        return length if self.context_length is None else min(length, self.context_length + 1)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference are needed."""
        return self.beta > 0

    @property
    def rewards_read_reference(self) -> bool:
        """Whether advantages depend on the log-probabilities of the reference."""
        return self.needs_reference and self.kl == "reward"

    def loss(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return the loss, and what happened as metrics."""
        tokens = read_field(batch, "tokens")
        logits = _logits(model, tokens)
        new = -cross_entropy(logits, tokens[:, 1:])
        self._check_ends(logits.shape[-1])
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
        tokens_of_each = lengths[:, 0] if self.mean == "sequence" else self.max_generation_steps
        return weigh((losses * mask).sum(axis=1) / tokens_of_each, counted), metrics

    def _check_ends(self, vocabulary: int) -> None:
        unknown = [token for token in self.eos_tokens or () if not 0 <= token < vocabulary]
        if unknown:
            raise UserError(
                f"{Setting('generation.eos_tokens', self.eos_tokens)} has the token {unknown[0]}, "
                "which the model does not know",
                why=f"its {vocabulary:,} tokens are 0 to {vocabulary - 1}",
                fix="name tokens of this model, or leave the setting out: completions then end "
                "where the model's folder says",
            )

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
        return objective, low, (ratio > highest) & (advantage > 0)

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

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, NDArray[Any]]:
        """Return random completions with random advantages, of the shapes of real ones."""
        random = np.random.default_rng(seed)
        fields = self.fields(batch_size, max(1, len(self.reward_names)))
        made: dict[str, NDArray[Any]] = {}
        made |= {name: np.ones(shape, dtype) for name, (shape, dtype) in fields.items()}
        made["tokens"] = random.integers(self.vocab_size, size=fields["tokens"][0]).astype(np.int32)
        made["completion_mask"][:, : self.max_prompt_length - 1] = 0
        for name in ("sampler_log_probs", "reference_log_probs"):
            if name in made:
                made[name] = np.full_like(made[name], -math.log(max(self.vocab_size, 2)))
        made["advantages"] = random.standard_normal(batch_size).astype(np.float32)
        return made


def token_log_probs(model: Any, batch: Batch) -> Array:
    """Return the log-probability of each target: [B, L-1]."""
    tokens = read_field(batch, "tokens")
    return -cross_entropy(_logits(model, tokens), tokens[:, 1:])


def _logits(model: Any, tokens: Array) -> Array:
    """Return the logits of all targets, [B, L-1, V].

    The model runs in evaluation mode, as it does when it samples: dropout would tell another model.
    """
    if hasattr(model, "eval"):
        model.eval()
    return model(tokens[:, :-1])


def reference_log_probs(model: Any, batch: Batch) -> Array:
    """Return the log-probabilities of a model with its adapters switched off."""
    return reference(token_log_probs, model, batch)


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
