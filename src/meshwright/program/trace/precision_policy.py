"""The precision policy while a model is traced: which values are cast, and where."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

COMPUTE_DTYPES: dict[str, Any] = {"no": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}


class Policy:
    """Casts values that cross module boundaries to the compute dtype; None casts nothing."""

    def __init__(self, compute_dtype: Any) -> None:
        self._compute = compute_dtype
        self._depth = 0

    @contextmanager
    def inside_module(self) -> Generator[None]:
        """Count how deep in modules the trace is."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def on_entry(self, values: Any) -> Any:
        """Cast what a module is given."""
        return cast_floats(values, jnp.float32, self._compute)

    def on_exit(self, values: Any) -> Any:
        """Cast what a module returns: the loss gets float32, other modules the compute dtype."""
        if self._compute is None:
            return values
        if self._depth == 0:
            return cast_floats(values, self._compute, jnp.float32)
        return cast_floats(values, jnp.float32, self._compute)


def cast_floats(values: Any, source: Any, target: Any) -> Any:
    """Cast the arrays of one floating format in a pytree to another.

    Modules, random streams and variables are left alone: they are references, and mapping over
    them would hand on a copy whose changes are lost.
    """
    if target is None:
        return values

    def cast(value: Any) -> Any:
        is_source = isinstance(value, jax.Array) and value.dtype == source
        return value.astype(target) if is_source else value

    return jax.tree.map(cast, values, is_leaf=lambda v: isinstance(v, nnx.Pytree | nnx.Variable))


def follow_policy(model: Any, compute_dtype: Any) -> None:
    """Let layers that fix their compute dtype at construction follow the policy.

    `nnx.Embed` resolves its dtype from its parameters when it is built, so that a model whose
    parameters are cast would go on in float32 after the lookup.
    """
    if compute_dtype is None:
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed) and module.dtype == jnp.float32:
            module.dtype = compute_dtype


def zeros_for_sums(values: Any) -> Any:
    """Return zeros that gradients are added up in: 16 bits would lose the smaller of two."""

    def zeros(value: Any) -> Any:
        return jnp.zeros(value.shape, jnp.promote_types(value.dtype, jnp.float32))

    return jax.tree.map(zeros, values)
