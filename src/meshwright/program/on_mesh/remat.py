"""What a block saves for its backward pass, and what it recomputes or gathers again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.evaluate.weight_uses import GATHERED
from meshwright.program.kernels.joined_attention import ATTENDED


@dataclass(frozen=True)
class Remat:
    """What a block saves for its backward pass: by a JAX checkpoint policy, or None for everything.

    With ``gather_per_block``, weights are gathered again for the backward pass; ``recomputes`` says
    whether more than that is done again.
    """

    policy: Callable[..., Any] | None = None
    gather_per_block: bool = False
    recomputes: bool = False


def choose_remat(kind: str, *, keep_gathered: bool) -> Remat:
    """Return the checkpoint policy for a value of ``remat`` and of ``keep_gathered``."""
    policies = jax.checkpoint_policies
    if kind == "full":
        return Remat(policies.nothing_saveable, not keep_gathered, recomputes=True)
    if kind != "none":
        saved = _products_and_attention if kind == "dots" else getattr(policies, kind)
        return Remat(_but_complex(saved), not keep_gathered, recomputes=True)
    if keep_gathered:
        return Remat()
    return Remat(_but_complex(_all_but_gathered), gather_per_block=True)


def _products_and_attention(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Save products with weights, and what attention kernels save for their gradient.

    Attention is not recomputed: it takes longer than other operations between two products,
    and what it saves is no larger than its operands.
    """
    if primitive.name == "name":
        return params["name"] == ATTENDED
    by_cudnn = primitive.name.startswith("dot_product_attention_fwd")
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return by_cudnn or bool(products(primitive, *inputs, **params))


def _all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Save everything except gathered weights and keys.

    Results of constraints, of broadcasts and of casts to a wider dtype are not saved either: their
    operand is not larger, and for weights it is the sharded one.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name == "convert_element_type":
        return params["new_dtype"].itemsize <= inputs[0].dtype.itemsize
    return primitive.name not in ("sharding_constraint", "broadcast_in_dim", "all_gather")


def _but_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy that saves no complex numbers.

    JAX rounds what a checkpoint saves by `reduce_precision`, which does not take complex numbers.
    """

    def saves(primitive: Any, *inputs: Any, **params: Any) -> Any:
        return not _may_be_complex(primitive, inputs, params) and policy(
            primitive, *inputs, **params
        )

    return saves


def _may_be_complex(primitive: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether an operation can have complex results: it reads or makes complex numbers."""
    dtypes = [getattr(value, "dtype", None) for value in inputs]
    return primitive.name in ("complex", "fft") or any(
        dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
        for dtype in (*dtypes, params.get("new_dtype"))
    )
