"""What a block saves for its backward pass, and what it computes or gathers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.program.evaluate.gather import GATHERED


@dataclass(frozen=True)
class Remat:
    """What a block saves for its backward pass.

    Attributes:
        policy: JAX checkpoint policy; None saves everything.
        gather_per_block: whether weights are gathered again for the backward pass.
    """

    policy: Callable[..., Any] | None = None
    gather_per_block: bool = False


def choose_remat(kind: str, *, keep_gathered: bool) -> Remat:
    """Return the checkpoint policy for a value of ``remat`` and of ``keep_gathered``."""
    policies = jax.checkpoint_policies
    if kind == "full":
        return Remat(policies.nothing_saveable, not keep_gathered)
    if kind == "dots":
        return Remat(policies.dots_with_no_batch_dims_saveable, not keep_gathered)
    if kind != "none":
        return Remat(getattr(policies, kind), not keep_gathered)
    if keep_gathered:
        return Remat()
    return Remat(_all_but_gathered, gather_per_block=True)


def _all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Save everything except gathered weights.

    Results of constraints and of casts to a wider dtype are not saved either: their operand is not
    larger, and for weights it is the divided one.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name == "convert_element_type":
        return params["new_dtype"].itemsize <= inputs[0].dtype.itemsize
    return primitive.name != "sharding_constraint"
