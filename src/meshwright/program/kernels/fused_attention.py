"""Attention: cuDNN's kernel on GPUs, and a form for any device that saves no scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import dot_product_attention
from jax.sharding import PartitionSpec

from meshwright.errors import first_line
from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.evaluator import Environment, constrain
from meshwright.program.evaluate.mesh_view import MeshView, run_locally
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import Value, aval_of
from meshwright.program.kernels.attention_operands import AttentionOperands
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.kernels.masks import Allowed
from meshwright.program.kernels.regions import NotReplaced, Region

Attend = Callable[..., Any]
"""(query [B, T, H, C], key and value [B, S, K, C], mask [B, 1, T, S] or None) → [B, T, H, C].

A mask says all that queries may attend to.
"""


ATTENDED = "attended"
"""The name of what attention saves for its gradient besides its operands."""


@dataclass(frozen=True)
class AttentionKernel:
    """Evaluates attention by a kernel for query, key and value.

    Attributes:
        name: ``cudnn`` or ``xla``.
        operands: what it reads.
        layouts: how its inputs and its result are sharded over the mesh; None where they are not.
        exchange: how positions are exchanged over the context axis; None if they are not.
        planned: whether it is only traced, for a plan on devices that are not present.
    """

    name: str
    operands: AttentionOperands
    layouts: tuple[PartitionSpec | None, ...]
    exchange: AttentionLayouts | None = None
    planned: bool = False

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the result of the second product."""
        form = cudnn_attention if self.name == "cudnn" and env.evaluator.weights.casts else None
        form = planned_attention if form and self.planned else form
        attend = (form or xla_attention)(self.operands.allowed, self.operands.scale)
        inputs = [env.read(variable) for variable in region.inputs]
        exchange = self.exchange
        own = exchange is not None and not exchange.by_heads
        run = partial(run_attention, self.operands, attend, own_rows=own)
        result = run_locally(run, inputs, self.layouts[:-1], self.layouts[-1], mesh)
        return [result if exchange is None else constrain(result, mesh.sharding(exchange.rows))]


def run_attention(
    operands: AttentionOperands, attend: Attend, *arrays: Any, own_rows: bool = False
) -> Any:
    """Evaluate attention on arrays with the dims of the program.

    With ``own_rows``, queries are those of this device's positions, and keys those of all.
    """
    query, key, value = arrays[:3]
    count = operands.num_batch
    query = jnp.transpose(query, operands.query_dims)
    shape = query.shape
    head = 1 if count > 1 else 0
    batch, heads, length = shape[: count - head], shape[count - head : count], shape[count]
    groups = shape[count + 1 : -1]
    # (batch…, heads, length, groups…, channels) → (batch…, length, heads, groups…, channels)
    query = jnp.moveaxis(query, count, count - head)
    query = query.reshape(math.prod(batch), length, math.prod(heads + groups), shape[-1])

    def of_keys(array: Any, dims: tuple[int, ...]) -> Any:
        array = jnp.moveaxis(jnp.transpose(array, dims), count, count - head)
        return array.reshape(math.prod(batch), -1, math.prod(heads), array.shape[-1])

    key, value = of_keys(key, operands.key_dims), of_keys(value, operands.value_dims)
    mask = None
    first = jax.lax.axis_index(CONTEXT) * length if own_rows else 0
    if operands.mask is not None:
        mask = _rows_and_keys(operands, arrays[3], batch, length)
        mask &= _band(operands.allowed, mask.shape[-2:], first)
    elif own_rows and (operands.allowed.causal or operands.allowed.window is not None):
        mask = _band(operands.allowed, (length, key.shape[1]), first)[None, None]
    out = attend(query, key, value, mask)
    out = out.reshape(*batch, length, *heads, *groups, out.shape[-1])
    return jnp.transpose(jnp.moveaxis(out, count - head, count), operands.output_dims)


def _rows_and_keys(
    operands: AttentionOperands, mask: Any, batch: tuple[int, ...], length: int
) -> Any:
    """Return a mask as [B, 1, T, S]."""
    count, last = operands.num_batch, len(operands.query_dims) - 1
    dims = operands.mask_dims
    keys = next(mask.shape[d] for d, at in enumerate(dims) if at == last)
    kept = sorted((at, d) for d, at in enumerate(dims) if at is not None)
    ordered = jnp.transpose(
        mask, [*(d for _, d in kept), *(d for d, at in enumerate(dims) if at is None)]
    )
    present = [at for at, _ in kept]
    wanted = [*range(len(batch)), count, last]
    shape = [ordered.shape[present.index(at)] if at in present else 1 for at in wanted]
    full = (*batch, length, keys)
    return jnp.broadcast_to(ordered.reshape(shape), full).reshape(math.prod(batch), 1, length, keys)


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


PLANNED = "planned_attention"
"""How the calls of planned attention are named; what follows is the part of the scores that is
computed, in thousandths."""
PLANNED_GRADIENT = "planned_gradient_of_attention"


def planned_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention as one call for each pass, which reads, saves and writes what cuDNN does.

    It is traced for plans, on machines without cuDNN.
    """
    del scale

    def call(name: str, run: Callable[..., Any], query: Any, key: Any, *others: Any) -> Any:
        part = allowed.part(query.shape[1], key.shape[1])
        run.__name__ = f"{name}_{round(1000 * part)}"
        return jax.jit(run)(query, key, *others)

    def attended(query: Any, key: Any, value: Any, mask: Any) -> Any:
        def run(query: Any, key: Any, value: Any, mask: Any) -> Any:
            del mask
            heads = (*query.shape[:2], key.shape[2], -1, query.shape[3])
            scores = jnp.einsum("btkgc,bskc->bkgts", query.reshape(heads), key)
            mixed = jnp.einsum("bkgts,bskc->btkgc", scores, value).reshape(query.shape)
            sums = scores.sum(-1).reshape(query.shape[0], query.shape[2], query.shape[1])
            return mixed, sums.astype(jnp.float32)

        return call(PLANNED, run, query, key, value, mask)

    def gradients(query: Any, key: Any, value: Any, *others: Any) -> Any:
        def run(query: Any, key: Any, value: Any, *others: Any) -> Any:
            del others
            return query, key, value

        return call(PLANNED_GRADIENT, run, query, key, value, *others)

    @jax.custom_vjp
    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return attended(query, key, value, mask)[0]

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        results = attended(query, key, value, mask)
        out, sums = (checkpoint_name(result, ATTENDED) for result in results)
        return out, (query, key, value, mask, out, sums)

    def backward(saved: Any, cotangent: Any) -> Any:
        return (*gradients(*saved, cotangent), None)

    attend.defvjp(forward, backward)
    return attend


def check_cudnn(operands: AttentionOperands, platform: str, *, planned: bool = False) -> None:
    """Raise if cuDNN has no kernel for these operands; ``planned`` asks no installed release."""
    if platform != "gpu":
        raise NotReplaced("it needs a GPU")
    query, value = aval_of(operands.query), aval_of(operands.value)
    if query.dtype not in HALF:
        raise NotReplaced(f"it needs bf16 or fp16, not {query.dtype}")
    channels = query.shape[operands.query_dims[-1]]
    if channels != value.shape[operands.value_dims[-1]]:
        raise NotReplaced("keys and values have different numbers of channels")
    if channels % 8 or channels > 256:
        raise NotReplaced(
            f"it needs heads of at most 256 channels, a multiple of 8, not {channels}"
        )
    length = query.shape[operands.query_dims[operands.num_batch]]
    keys = aval_of(operands.key).shape[operands.key_dims[-2]]
    if operands.mask is not None and (length % 2 or keys % 2):
        raise NotReplaced(f"packed documents need rows of even length, not {length}")
    if planned and (length % 2 or keys % 2):
        # JAX 0.11 and 0.12 refuse them.
        raise NotReplaced(f"it needs rows of even length, not {length}")
    form = operands.allowed, operands.scale, operands.mask is not None
    if not planned and (refusal := _refusal(length, keys, channels, query.dtype, *form)):
        raise NotReplaced(f"cuDNN has no kernel for it: {refusal}")


@lru_cache
def _refusal(
    length: int,
    keys: int,
    channels: int,
    dtype: Any,
    allowed: Allowed,
    scale: float,
    has_mask: bool,
) -> str:
    """Return why JAX refuses an attention and its gradient; once for all blocks of a model."""
    query = jax.ShapeDtypeStruct((1, length, 1, channels), dtype)
    key = jax.ShapeDtypeStruct((1, keys, 1, channels), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, length, keys), bool) if has_mask else None
    attend = cudnn_attention(allowed, scale)

    def total(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return attend(query, key, value, mask).astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), query, key, key, mask)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return first_line(error)
    return ""


def xla_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention that saves queries, keys and values, and no scores.

    Its gradient recomputes the scores, from which the saved sums of exponentials make the weights.
    """

    def scores(query: Any, key: Any, mask: Any) -> Any:
        wide = jnp.promote_types(query.dtype, jnp.float32)
        out = jnp.einsum("btkgc,bskc->bkgts", query, key, preferred_element_type=wide) * scale
        visible = _band(allowed, out.shape[-2:]) if mask is None else mask[:, None]
        return jnp.where(visible, out, -jnp.inf)

    def forward_pass(query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any]:
        values = scores(query, key, mask)
        peak = values.max(-1, keepdims=True)
        exponentials = jnp.exp(values - peak)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(value.dtype)
        mixed = jnp.einsum("bkgts,bskc->btkgc", weights, value)
        return mixed, peak + jnp.log(total)

    @jax.custom_vjp
    def grouped(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return forward_pass(query, key, value, mask)[0]

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        results = forward_pass(query, key, value, mask)
        out, normalizer = (checkpoint_name(result, ATTENDED) for result in results)
        return out, (query, key, value, mask, normalizer)

    def backward(saved: Any, cotangent: Any) -> Any:
        query, key, value, mask, normalizer = saved
        wide = normalizer.dtype
        weights = jnp.exp(scores(query, key, mask) - normalizer)
        product = partial(jnp.einsum, preferred_element_type=wide)
        of_value = product("bkgts,btkgc->bskc", weights.astype(value.dtype), cotangent)
        of_weights = product("btkgc,bskc->bkgts", cotangent, value)
        mean = (weights * of_weights).sum(-1, keepdims=True)
        of_scores = weights * (of_weights - mean) * scale
        of_scores = of_scores.astype(query.dtype)
        of_query = product("bkgts,bskc->btkgc", of_scores, key)
        of_key = product("bkgts,btkgc->bskc", of_scores, query)
        gradients = (of_query, of_key, of_value)
        return (*(g.astype(x.dtype) for g, x in zip(gradients, saved, strict=False)), None)

    grouped.defvjp(forward, backward)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        batch, length, heads, channels = query.shape
        kv_heads = key.shape[2]
        query = query.reshape(batch, length, kv_heads, heads // kv_heads, channels)
        out = grouped(query, key, value, mask)
        return out.reshape(batch, length, heads, out.shape[-1])

    return attend


def _band(allowed: Allowed, shape: tuple[int, ...], first: Any = 0) -> Any:
    """Return which keys [S] queries [T], from position `first`, may attend to, by distance."""
    distance = first + jnp.arange(shape[0])[:, None] - jnp.arange(shape[1])[None, :]
    visible = distance >= 0 if allowed.causal else jnp.ones(shape, bool)
    return visible if allowed.window is None else visible & (distance < allowed.window)
