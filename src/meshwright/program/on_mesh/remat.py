"""What a block keeps for its backward pass, and what it computes or gathers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.program.evaluate.gather import GATHERED


@dataclass(frozen=True)
class Remat:
    """What of a block is kept for its backward pass.

    Attributes:
        policy: JAX checkpoint policy; None keeps everything.
        gather_inside: whether weights are gathered again for the backward pass.
    """

    policy: Callable[..., Any] | None = None
    gather_inside: bool = False


def choose_remat(kind: str, *, keep_gathered: bool) -> Remat:
    """Return the checkpoint policy for a kind of remat and a lifetime of gathered weights."""
    policies = jax.checkpoint_policies
    if kind == "full":
        return Remat(policies.nothing_saveable, not keep_gathered)
    if kind == "dots":
        return Remat(policies.dots_with_no_batch_dims_saveable, not keep_gathered)
    if kind != "none":
        return Remat(getattr(policies, kind), not keep_gathered)
    if keep_gathered:
        return Remat()
    return Remat(_all_but_gathered, gather_inside=True)


def _all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keep everything except gathered weights.

    Neither constraints nor casts to a wider format are kept: what they were applied to is no
    larger, and for weights it is their divided form.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name == "convert_element_type":
        return params["new_dtype"].itemsize <= inputs[0].dtype.itemsize
    return primitive.name != "sharding_constraint"
