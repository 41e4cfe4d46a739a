"""The loss as optimizers may need it: its value, its gradients, and the function itself."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import Array

Flat = Any
"""Values of the parameter leaves: a list in the order of the step, or by path."""


@dataclass(frozen=True)
class Objective:
    """The loss of the batch at hand, and its gradients before clipping, there and elsewhere."""

    value: Array
    gradients: Flat
    evaluate: Callable[[Flat], tuple[Array, Flat]]

    def arguments(
        self,
        transformation: optax.GradientTransformation,
        to_tree: Callable[[Flat], Any],
        to_flat: Callable[[Any], Flat],
    ) -> Mapping[str, Any]:
        """Return those of optax's extra arguments that a transformation takes."""

        def value_fn(tree: Any) -> Array:
            return self._differentiable(to_flat(tree))

        offered = {
            "value": self.value,
            "grad": to_tree(self.gradients),
            "value_fn": value_fn,
            # optax.contrib.sam also passes the number of the inner step.
            "grad_fn": lambda tree, _=None: to_tree(self.evaluate(to_flat(tree))[1]),
        }
        return {name: offered[name] for name in accepted(transformation)}

    def _differentiable(self, params: Flat) -> Array:
        """Evaluate the loss so that optax can differentiate it.

        Accumulation and pipeline stages compute gradients their own way, which JAX would not
        find by differentiating the program.
        """
        loss = jax.custom_vjp(lambda params: self.evaluate(params)[0])

        def backward(gradients: Flat, cotangent: Array) -> tuple[Flat]:
            return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradients),)

        loss.defvjp(self.evaluate, backward)
        return loss(params)


def accepted(transformation: optax.GradientTransformation) -> tuple[str, ...]:
    """Return the names of the extra arguments that the update of a transformation takes."""
    if not isinstance(transformation, optax.GradientTransformationExtraArgs):
        return ()
    parameters = inspect.signature(transformation.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        # Line searches refuse arguments beyond these that they do not know.
        return ("value", "grad", "value_fn")
    return tuple(name for name in ("value", "grad", "value_fn", "grad_fn") if name in parameters)


def runs_without_loss(update: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Whether the update of an optimizer can do without optax's extra arguments."""
    try:
        jax.eval_shape(update, *arguments)
    except Exception:
        return False
    return True
