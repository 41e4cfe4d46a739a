"""Attention: cuDNN's kernel on GPUs, and a form for any device that saves no scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention
from jax.sharding import PartitionSpec

from meshwright.errors import first_line
from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.evaluator import Environment, Evaluator, constrain
from meshwright.program.evaluate.mesh_view import MeshView, run_locally
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import Equation, Value, aval_of, bind
from meshwright.program.kernels.attention_operands import AttentionOperands
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.kernels.joined_attention import NEVER, Attend, AttentionPart, differentiable
from meshwright.program.kernels.masks import Allowed, band
from meshwright.program.kernels.regions import NotReplaced, Region


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
        by_cudnn = self.name == "cudnn" and env.evaluator.weights.casts
        form = cudnn_attention if by_cudnn else xla_attention
        form = planned_attention if by_cudnn and self.planned else form
        attend = form(self.operands.allowed, self.operands.scale)
        inputs = [env.read(variable) for variable in region.inputs]
        exchange, layouts = self.exchange, list(self.layouts)
        own = exchange is not None and not exchange.by_heads
        if exchange is not None and exchange.shared is not None:
            part = partial(cudnn_part if by_cudnn else xla_part, scale=self.operands.scale)
            attend, own = exchange.shared.attention(part, exchange.repeated[0][1]), False
            layouts[1:3] = exchange.own_keys
        run = partial(run_attention, self.operands, attend, own_rows=own)
        result = run_locally(run, inputs, layouts[:-1], layouts[-1], mesh)
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
        mask &= band(operands.allowed, mask.shape[-2:], first)
    elif own_rows and (operands.allowed.causal or operands.allowed.window is not None):
        mask = band(operands.allowed, (length, key.shape[1]), first)[None, None]
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

    return differentiable(AttentionPart(attended, gradients))


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


def xla_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention that saves queries, keys, values and its result, and no scores."""
    return differentiable(xla_part(allowed, scale))
