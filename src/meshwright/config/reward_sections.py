"""The sections of ``task=grpo``: what is learned from rewards, and how completions are drawn."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.config.base import Count, Frozen


class GrpoConfig(Frozen):
    """Learning from rewards, for task=grpo.

    Attributes:
        rewards: bundled rewards by name, or your own as ``package.module:function``.
        reward_weights: how much each reward counts; null means 1 each.
        reward_seconds: the most seconds of a call of a reward; a completion that needs longer is
            lost.
        reward_processes: the most processes that call rewards.
        num_generations: completions of each prompt, which are compared with each other.
        num_iterations: updates for each rollout.
        beta: weight of the KL divergence from the model that training started from; 0 keeps no
            copy of it.
        kl: whether the divergence is a part of the loss (k3) or of the reward (k1).
        epsilon: how far probability ratios may fall below 1, and rise above it.
        epsilon_high: how far they may rise; null means epsilon.
        dual_clip: the most that a ratio counts where the advantage is negative; null means no
            limit.
        scale_advantages: divide by the standard deviation of the group, of the batch, or by none.
        leave_one_out: whether a reward is compared with the mean of the others instead of all.
        mean: the loss is a mean over all tokens; over sequences, of means over their tokens; or
            over sequences, of sums divided by generation.max_generation_steps (length).
        ratio: whether each token has a probability ratio, or each sequence (GSPO).
        mask_truncated: whether completions that did not end are left out of the loss.
        importance_cap: the largest weight that makes up for temperature, top-k and top-p; null
            makes up for nothing.
    """

    rewards: Annotated[list[str], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = (
        Field(default_factory=list[str])
    )
    reward_weights: list[float] | None = None
    reward_seconds: float = Field(default=10.0, gt=0)
    reward_processes: Count = 2
    num_generations: int = Field(default=4, ge=2, lt=2**16)
    num_iterations: Count = 1
    beta: float = Field(default=0.08, ge=0)
    kl: Literal["loss", "reward"] = "loss"
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    scale_advantages: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False
    mean: Literal["token", "sequence", "length"] = "token"
    ratio: Literal["token", "sequence"] = "token"
    mask_truncated: bool = False
    importance_cap: float | None = Field(default=2.0, gt=0)


class GenerationConfig(Frozen):
    """How completions are drawn, for task=grpo.

    Attributes:
        max_prompt_length: the most tokens of a prompt; longer ones are refused.
        max_generation_steps: the most tokens of a completion.
        temperature: 1 samples from the model's distribution, less prefers likely tokens.
        top_k: sample from the k likeliest tokens; 0 means all.
        top_p: sample from the likeliest tokens that reach this probability together.
        eos_tokens: tokens that end a completion; null means those of the model.
        generation_batch_size: completions that are generated at a time; null means all of a step.
    """

    max_prompt_length: Count = 256
    max_generation_steps: Count = 512
    temperature: float = Field(default=0.9, gt=0)
    top_k: int = Field(default=50, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    eos_tokens: list[int] | None = None
    generation_batch_size: Count | None = None
