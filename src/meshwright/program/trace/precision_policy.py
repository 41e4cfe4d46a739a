"""The precision policy of a traced model: which values are cast, and where."""

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
        """Count how many modules deep the trace is."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def on_entry(self, values: Any) -> Any:
        """Cast the arguments of a module."""
        return cast_floats(values, jnp.float32, self._compute)

    def on_exit(self, values: Any) -> Any:
        """Cast what a module returns: to float32 for the loss, to the compute dtype for modules."""
        if self._compute is None:
            return values
        if self._depth == 0:
            return cast_floats(values, self._compute, jnp.float32)
        return cast_floats(values, jnp.float32, self._compute)


def cast_floats(values: Any, source: Any, target: Any) -> Any:
    """Cast the arrays of one floating format in a pytree to another.

    Modules, random streams and variables are not touched: they are references, and mapping over
    them would pass on a copy, whose changes would be lost.
    """
    if target is None:
        return values

    def cast(value: Any) -> Any:
        is_source = isinstance(value, jax.Array) and value.dtype == source
        return value.astype(target) if is_source else value

    return jax.tree.map(cast, values, is_leaf=lambda v: isinstance(v, nnx.Pytree | nnx.Variable))


def follow_policy(model: Any, compute_dtype: Any) -> None:
    """Set the compute dtype of layers that fix theirs when they are built.

    `nnx.Embed` takes its dtype from its parameters at construction: without this, a model whose
    parameters are cast would continue in float32 after the lookup.
    """
    if compute_dtype is None:
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed) and module.dtype == jnp.float32:
            module.dtype = compute_dtype


def zeros_for_sums(values: Any) -> Any:
    """Return zeros to add gradients to, at least float32: 16 bits would lose small terms."""

    def zeros(value: Any) -> Any:
        return jnp.zeros(value.shape, jnp.promote_types(value.dtype, jnp.float32))

    return jax.tree.map(zeros, values)
