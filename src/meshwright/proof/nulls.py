"""Elements whose true gradient is zero: found by their size, and withheld from optimizers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.trace.layout import Layout
from meshwright.proof.compare import NULL_GRADIENT, Leaves, Masks, global_norm


class NoiseMasks:
    """Which elements of the gradients were noise in every step seen so far."""

    def __init__(self) -> None:
        self._null: dict[str, np.ndarray[Any, Any]] = {}
        self._moved: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, gradients: Leaves) -> None:
        """Add the gradients of a step."""
        limit = NULL_GRADIENT * global_norm(gradients)
        for path, gradient in gradients.items():
            null, moved = np.abs(gradient) <= limit, gradient != 0
            self._null[path] = null & self._null.get(path, True)
            self._moved[path] = moved | self._moved.get(path, False)

    def masks(self) -> Masks:
        """Return, by leaf, the elements that are noise.

        Exact zeros, such as the rows of tokens that never occur, are zeros on every device. They
        only count in leaves that also hold noise, or nothing else.
        """
        return {
            path: null
            for path, null in self._null.items()
            if null.all() or (null & self._moved[path]).any()
        }


def within(masks: Masks, others: Masks) -> bool:
    """Whether every masked element is masked by the others too."""
    return all(path in others and not (mask & ~others[path]).any() for path, mask in masks.items())


def masks_of_step(masks: Masks, layout: Layout) -> Masks:
    """Return masks by the paths of the model and by those of the step, whose leaves are stacks."""
    stacks: dict[str, np.ndarray[Any, Any]] = {}
    for step in layout.select("param"):
        leaves = [layout.leaves[source] for source in step.sources]
        if step.stacked and any(leaf.path in masks for leaf in leaves):
            rows = [masks.get(leaf.path, np.zeros(leaf.shape, bool)) for leaf in leaves]
            stacks[step.leaf.path] = np.stack([rows[n] for n in step.rows] if step.rows else rows)
    return {**masks, **stacks}


def withhold(gradients: Any, masks: Masks) -> Any:
    """Return the gradients with zeros for the masked elements.

    An optimizer that divides by the size of a gradient, or takes its sign, turns rounding noise
    around a true zero into a full step, and rounding differs between devices.
    """

    def zero_if_masked(path: Any, gradient: Any) -> Any:
        mask = masks.get(jax.tree_util.keystr(path, simple=True, separator="."))
        if mask is None:
            return gradient
        zeros = jnp.zeros_like(gradient)
        return zeros if mask.all() else jnp.where(mask, zeros, gradient)

    return jax.tree_util.tree_map_with_path(zero_if_masked, gradients) if masks else gradients


def null_parts(gradients: Leaves) -> dict[str, int]:
    """Return how many elements are noise in leaves of which others are not."""
    noise = NoiseMasks()
    noise.add(gradients)
    masks: Mapping[str, Any] = noise.masks()
    return {path: int(mask.sum()) for path, mask in masks.items() if not mask.all()}
