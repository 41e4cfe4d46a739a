"""Attention to a part of the keys, with the sums by which results for several parts are joined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import dot_product_attention

from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.jaxpr.equations import Equation, Value, bind
from meshwright.program.kernels.masks import Allowed, band

Attend = Callable[..., Any]
"""(query [B, T, H, C], key and value [B, S, K, C], mask [B, 1, T, S] or None) → [B, T, H, C].

A mask says all that queries may attend to.
"""

ATTENDED = "attended"
"""The name of what attention saves for its gradient besides its operands."""
NEVER = -1e30
"""The score of a hidden key: its weight is zero, unless all keys of a part are hidden."""


class AttentionPart(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        forward: from query, key, value and mask to the result and the logarithm [B, H, T] of the
            sum of exponentials that it is divided by.
        gradients: from the same operands, the result and the logarithm for all keys, and the
            gradient of that result, to the gradients of query, key and value.
    """

    forward: Callable[..., tuple[Any, Any]]
    gradients: Callable[..., tuple[Any, Any, Any]]


def differentiable(part: AttentionPart) -> Attend:
    """Return attention whose gradient is that of a part, which has all keys."""

    @jax.custom_vjp
    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return part.forward(query, key, value, mask)[0]

    def forward(*operands: Any) -> Any:
        out, total = (checkpoint_name(result, ATTENDED) for result in part.forward(*operands))
        return out, (*operands, out, total)

    def backward(saved: Any, cotangent: Any) -> Any:
        gradients = part.gradients(*saved, cotangent)
        return (*(g.astype(x.dtype) for g, x in zip(gradients, saved, strict=False)), None)

    attend.defvjp(forward, backward)
    return attend


def xla_part(allowed: Allowed, scale: float) -> AttentionPart:
    """Return attention that saves no scores: its gradient computes them again."""

    def grouped(array: Any, key: Any) -> Any:
        return array.reshape(*array.shape[:2], key.shape[2], -1, array.shape[3])

    def exponents(query: Any, key: Any, mask: Any) -> Any:
        wide = jnp.promote_types(query.dtype, jnp.float32)
        out = jnp.einsum("btkgc,bskc->bkgts", query, key, preferred_element_type=wide) * scale
        visible = band(allowed, out.shape[-2:]) if mask is None else mask[:, None]
        return jnp.where(visible, out, NEVER)

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        scores = exponents(grouped(query, key), key, mask)
        peak = scores.max(-1, keepdims=True)
        exponentials = jnp.exp(scores - peak)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(value.dtype)
        mixed = jnp.einsum("bkgts,bskc->btkgc", weights, value)
        total = (peak + jnp.log(total)).reshape(query.shape[0], query.shape[2], query.shape[1])
        return mixed.reshape(*query.shape[:3], -1), total

    def gradients(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        of_query, (out, total, cotangent) = grouped(query, key), rest
        of_out = grouped(cotangent, key)
        product = partial(jnp.einsum, preferred_element_type=total.dtype)
        scores = exponents(of_query, key, mask)
        weights = jnp.exp(scores - total.reshape(*scores.shape[:-1], 1))
        of_value = product("bkgts,btkgc->bskc", weights.astype(value.dtype), of_out)
        of_weights = product("btkgc,bskc->bkgts", of_out, value)
        mean = product("btkgc,btkgc->bkgt", of_out, grouped(out, key))[..., None]
        of_scores = (weights * (of_weights - mean) * scale).astype(query.dtype)
        gradient = product("bkgts,bskc->btkgc", of_scores, key).reshape(query.shape)
        return gradient, product("bkgts,btkgc->bskc", of_scores, of_query), of_value

    return AttentionPart(forward, gradients)


def cudnn_part(allowed: Allowed, scale: float) -> AttentionPart:
    """Return attention by cuDNN, whose calls are read from how JAX differentiates it."""
    attend = cudnn_attention(allowed, scale)

    def evaluate(run: Callable[..., Any], mask: Any, *arrays: Any, given: Any = None) -> Any:
        results = [] if given is None else list(given)

        def replace(eqn: Equation, env: Environment) -> list[Value] | None:
            if not eqn.primitive.name.startswith("dot_product_attention_fwd"):
                return None
            results[:] = results or bind(eqn, env.operands(eqn))
            return results

        def with_gradients(mask: Any, *arrays: Any) -> Any:
            return run(*jax.vjp(lambda *qkv: attend(*qkv, mask), *arrays[:3]), *arrays[3:])

        program = jax.make_jaxpr(with_gradients)(mask, *arrays)
        found = Evaluator([replace]).run(program, jax.tree.leaves((mask, *arrays)))
        return results if given is None else found

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return evaluate(lambda out, _: out, mask, query, key, value)

    def gradients(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pull = lambda _, pullback, cotangent: pullback(cotangent)  # noqa: E731
        return evaluate(pull, mask, query, key, value, rest[-1], given=rest[:-1])

    return AttentionPart(forward, gradients)


def cudnn_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention by cuDNN."""
    # How many keys before and after a query it attends to.
    window = None if allowed.window is None else (allowed.window - 1, 0)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=scale,
            is_causal=allowed.causal and mask is None,
            local_window_size=window if mask is None else None,
            implementation="cudnn",
        )

    return attend


def xla_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention that saves queries, keys, values and its result, and no scores."""
    return differentiable(xla_part(allowed, scale))
