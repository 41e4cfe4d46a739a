"""DynamicLossScaler: prevents underflow and overflow in fp16, for custom training loops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from meshwright.distributed.argument_forms import also_called
from meshwright.errors import UserError
from meshwright.step.state import LossScale, ScaleRule, all_finite
from meshwright.trees import PyTree


@dataclass(frozen=True)
class DynamicLossScalerConfig(ScaleRule):
    """How the scale changes: by default from 2^15, ×2 after 2000 good steps, ×0.5 on overflow."""

    def __post_init__(self) -> None:
        in_order = 0 < self.min_scale <= self.initial_scale <= self.max_scale
        if not in_order:
            raise UserError(
                "the limits of the loss scale are not in order",
                why=f"min_scale={self.min_scale}, initial_scale={self.initial_scale}, "
                f"max_scale={self.max_scale}",
                fix="choose 0 < min_scale ≤ initial_scale ≤ max_scale",
            )
        if self.growth_factor < 1 or not 0 < self.backoff_factor < 1 or self.growth_interval < 1:
            raise UserError(
                "the factors of the loss scale are not valid",
                why=f"growth_factor={self.growth_factor}, backoff_factor={self.backoff_factor}, "
                f"growth_interval={self.growth_interval}",
                fix="choose growth_factor ≥ 1, 0 < backoff_factor < 1 and growth_interval ≥ 1",
            )


@jax.tree_util.register_pytree_node_class
class DynamicLossScaler:
    """Scales the loss so that fp16 gradients neither vanish nor overflow.

    It is a pytree: a compiled function takes it as an argument and returns it.

    Args:
        config: how the scale changes.
    """

    def __init__(self, config: DynamicLossScalerConfig | None = None) -> None:
        self.config = config or DynamicLossScalerConfig()
        self._state = LossScale.initial(self.config.initial_scale)

    @property
    def scale(self) -> Array:
        """Factor on the loss, a float32 scalar."""
        return self._state.scale

    @property
    def skipped(self) -> Array:
        """Number of overflows so far."""
        return self._state.skipped

    @property
    def steps_since_growth(self) -> Array:
        """Good steps since the scale last changed; it grows after ``growth_interval`` of them."""
        return self._state.good_steps

    def scale_loss(self, loss: Array | float) -> Array:
        """Return the loss times the scale; a half-precision loss becomes float32."""
        return self._rescale(loss, jnp.multiply)

    def unscale_gradients(self, grads: PyTree) -> PyTree:
        """Return the gradients divided by the scale; half-precision ones become float32.

        In float16 the quotients would underflow, which the scale is there to prevent.
        """
        return jax.tree.map(lambda leaf: self._rescale(leaf, jnp.divide), grads)

    def check_overflow(self, grads: PyTree) -> Array:
        """Whether any gradient, scaled or not, is infinite or NaN."""
        return _overflows(grads)

    @also_called(overflow="overflow_detected")
    def update_scale(self, overflow_detected: Array | bool) -> None:
        """Set the next step's scale: smaller after an overflow, larger after many good steps."""
        self._check_owned()
        self._state = self._state.after(jnp.logical_not(overflow_detected), self.config)

    def tree_flatten(self) -> tuple[tuple[LossScale], DynamicLossScalerConfig]:
        """Return arrays and config, for JAX."""
        return (self._state,), self.config

    @classmethod
    def tree_unflatten(cls, config: DynamicLossScalerConfig, children: tuple[LossScale]) -> Self:
        """Return a scaler from arrays and config, for JAX."""
        scaler = cls.__new__(cls)
        scaler.config, scaler._state = config, children[0]
        return scaler

    def _rescale(self, value: Any, operation: Callable[[Array, Array], Array]) -> Array:
        self._check_owned()
        wide = jnp.promote_types(jnp.result_type(value), jnp.float32)
        return operation(jnp.asarray(value, wide), self.scale.astype(wide))

    def _check_owned(self) -> None:
        """Raise if the scale would become a constant of a compiled function."""
        # A sum of constants is traced only while a function is compiled, not under jax.grad.
        if not isinstance(self.scale, Tracer) and isinstance(self.scale + 0, Tracer):
            raise UserError(
                "the loss scaler is used in a compiled function, but is not an argument of it",
                why="its scale would be a constant of the compiled function",
                fix="pass the scaler to the function, and return it if the function updates it",
            )


@jax.jit
def _overflows(grads: PyTree) -> Array:
    return jnp.logical_not(all_finite(grads))
