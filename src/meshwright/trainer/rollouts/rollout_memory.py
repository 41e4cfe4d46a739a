"""What the rollouts of a task need in memory, from the model without values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.generation.model_facts import cache_shapes
from meshwright.generation.text_settings import HALF
from meshwright.planner.estimate.rollout_needs import RolloutNeeds
from meshwright.program.trace.build_model import ModelSource, abstract_model
from meshwright.tasks.grpo import GRPO


def rollout_needs(task: Any, model: ModelSource, precision: str) -> RolloutNeeds | None:
    """Return what the rollouts of a task need; None if it has none."""
    if not isinstance(task, GRPO):
        return None
    logits, cache = cache_shapes(
        abstract_model(model), task.max_prompt_length, task.most_tokens, HALF.get(precision)
    )
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    # Drawing keeps the logits in float32, with their order and the random numbers beside them.
    sizes.append(3 * logits.size * jnp.dtype(jnp.float32).itemsize)
    return RolloutNeeds(sum(sizes), task.generation_batch_size, task.needs_reference)
