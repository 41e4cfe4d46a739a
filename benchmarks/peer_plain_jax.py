"""A side of a comparison without a framework: Gemma 3 1B and its step by hand, in plain JAX.

It shows how fast the model can be in JAX: cuDNN attention, activations as rows [B·T, D], norms that
keep only their input for the gradient, and a loss that computes its gradients in the forward pass,
part by part. AdamW, clipping at norm 1.0, float32 master weights, and compute in bf16.
"""

from __future__ import annotations

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_cases import Case
from peer_process import since_start, tell, told_to_go, turn_over

HALF, EPSILON = jnp.bfloat16, 1e-6
Weights = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of a batch."""

    rows: int = 4
    length: int = 2048
    vocabulary: int = 262144
    blocks: int = 26
    width: int = 1152
    heads: int = 4
    head: int = 256
    inside: int = 6912
    window: int = 512
    global_every: int = 6
    parts: int = 8
    attention: str = "cudnn"


NANO = Sizes(4, 64, 1024, 2, 64, 4, 16, 128, 16, 2, 2, "xla")


@jax.custom_vjp
def norm(x: Any, scale: Any) -> Any:
    """Root mean square norm of rows [N, D], whose gradient recomputes from its input."""
    return _norm_forward(x, scale)[0]


def _norm_forward(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
    return (wide * root * (1 + scale)).astype(x.dtype), (x, root, scale)


def _norm_backward(saved: Any, gradient: Any) -> Any:
    x, root, scale = saved
    unit, wide = x.astype(jnp.float32) * root, gradient.astype(jnp.float32)
    along = wide * (1 + scale)
    inner = root * (along - unit * (along * unit).mean(-1, keepdims=True))
    of_scale = (wide * unit).sum(tuple(range(wide.ndim - 1)))
    return inner.astype(x.dtype), of_scale.astype(scale.dtype)


norm.defvjp(_norm_forward, _norm_backward)


def rotate(x: Any, base: float) -> Any:
    """Rotate the halves of each head of x [B, T, H, C] by position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(
        x.dtype
    )


def block(x: Any, w: Weights, sizes: Sizes, *, whole: bool) -> Any:
    """One block on rows [B·T, D]; `whole` for one that sees all earlier positions."""
    scales = {k: v for k, v in w.items() if k.startswith("n_")}
    w = {k: v.astype(HALF) for k, v in w.items()} | scales
    shape, base = (sizes.rows, sizes.length), 1e6 if whole else 1e4
    hidden = norm(x, w["n_attention"])
    cuts = (sizes.heads * sizes.head, (sizes.heads + 1) * sizes.head)
    query, key, value = jnp.split(hidden @ w["qkv"], cuts, -1)
    query = norm(query.reshape(*shape, sizes.heads, sizes.head), w["n_query"])
    key = norm(key.reshape(*shape, 1, sizes.head), w["n_key"])
    mixed = jax.nn.dot_product_attention(
        rotate(query, base),
        rotate(key, base),
        value.reshape(*shape, 1, sizes.head),
        is_causal=True,
        local_window_size=None if whole else (sizes.window - 1, 0),
        implementation=sizes.attention,  # pyright: ignore[reportArgumentType]
    )
    mixed = mixed.reshape(-1, sizes.heads * sizes.head) @ w["out"]
    x = x + norm(mixed, w["n_attention_out"])
    gate, up = jnp.split(norm(x, w["n_mlp"]) @ w["gate_up"], 2, -1)
    return x + norm(gated(gate, up) @ w["down"], w["n_mlp_out"])


@jax.custom_vjp
def gated(gate: Any, up: Any) -> Any:
    """gelu(gate) · up, whose gradient recomputes from its inputs."""
    return jax.nn.gelu(gate) * up


def _gated_backward(saved: Any, gradient: Any) -> Any:
    gate, up = saved
    value, slope = jax.vjp(jax.nn.gelu, gate)
    return slope(gradient * up)[0], gradient * value


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)


def nats(x: Any, table: Any, targets: Any, parts: int) -> tuple[Any, Any, Any]:
    """Return the mean loss and its gradients to x [N, D] and the table, part by part."""
    count, half = len(x), table.astype(HALF)

    def part(carry: Any, operands: Any) -> Any:
        total, of_table = carry
        rows, wanted = operands
        logits = (rows @ half.T).astype(jnp.float32)
        top = logits.max(-1, keepdims=True)
        powers = jnp.exp(logits - top)
        weight = powers.sum(-1, keepdims=True)
        hit = jnp.arange(logits.shape[-1]) == wanted[:, None]
        lost = (top + jnp.log(weight))[:, 0] - jnp.where(hit, logits, 0).sum(-1)
        slope = ((powers / weight - hit) / count).astype(HALF)
        more = jnp.einsum("nv,nd->vd", slope, rows, preferred_element_type=jnp.float32)
        return (total + lost.sum(), of_table + more), slope @ half

    start = jnp.zeros(()), jnp.zeros(table.shape, jnp.float32)
    cut = x.reshape(parts, -1, x.shape[-1]), targets.reshape(parts, -1)
    (total, of_table), of_x = jax.lax.scan(part, start, cut)
    return total / count, of_x.reshape(x.shape), of_table


def loss_of(weights: Weights, tokens: Any, sizes: Sizes) -> Any:
    """Return the mean loss of rows of tokens [B, T+1]."""
    table = weights["table"]
    inputs, targets = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    x = table.astype(HALF)[inputs] * jnp.asarray(math.sqrt(sizes.width), HALF)
    for number, w in enumerate(weights["blocks"], 1):
        x = block(x, w, sizes, whole=number % sizes.global_every == 0)
    x = norm(x, weights["norm"])

    @jax.custom_vjp
    def loss(x: Any, table: Any) -> Any:
        return nats(x, table, targets, sizes.parts)[0]

    def forward(x: Any, table: Any) -> Any:
        value, *gradients = nats(x, table, targets, sizes.parts)
        return value, gradients

    def backward(gradients: Any, outer: Any) -> Any:
        return gradients[0] * outer.astype(HALF), gradients[1] * outer

    loss.defvjp(forward, backward)
    return loss(x, table)


def initial(sizes: Sizes) -> Weights:
    """Draw the weights."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * sizes.blocks + 1))
    size, head = sizes.width, sizes.head

    def draw(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    def zeros(count: int) -> Any:
        return jnp.zeros(count, jnp.float32)

    blocks = [
        {
            "qkv": draw(size, (sizes.heads + 2) * head),
            "out": draw(sizes.heads * head, size),
            "gate_up": draw(size, 2 * sizes.inside),
            "down": draw(sizes.inside, size),
            "n_query": zeros(head),
            "n_key": zeros(head),
            **{f"n_{n}": zeros(size) for n in ("attention", "attention_out", "mlp", "mlp_out")},
        }
        for _ in range(sizes.blocks)
    ]
    return {"table": draw(sizes.vocabulary, size), "norm": zeros(size), "blocks": blocks}


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def step(state: Any, tokens: Any, sizes: Sizes) -> Any:
    """One step: gradients, clipping, AdamW."""
    weights, first, second, count = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, sizes)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / size), gradients)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)

    def move(w: Any, m: Any, v: Any) -> Any:
        slope = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
        return w - 1e-4 * (slope + 0.1 * w)

    return (jax.tree.map(move, weights, first, second), first, second, count), (loss, size)


def train_plain(case: Case, data: Path, steps: int) -> None:
    """Train Gemma 3 1B in turns, on rows of a file of tokens that a thread reads ahead."""
    sizes = NANO if case.data.units == NANO.length else Sizes(case.rows, case.data.units)
    weights = jax.jit(initial, static_argnums=0)(sizes)
    zeros = [jax.tree.map(jnp.zeros_like, weights) for _ in "ab"]
    state = (weights, *zeros, jnp.zeros((), jnp.float32))
    params = sum(leaf.size for leaf in jax.tree.leaves(weights))
    del weights, zeros
    tokens, order = np.load(data, mmap_mode="r"), np.random.default_rng(0)

    def read() -> Any:
        starts = order.integers(0, len(tokens) - sizes.length - 1, sizes.rows)
        rows = np.stack([tokens[s : s + sizes.length + 1] for s in starts])
        return jax.device_put(rows.astype(np.int32))

    compiled = step.lower(state, read(), sizes).compile()
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(read)

        def advance(state: Any) -> Any:
            nonlocal ahead
            rows, ahead = ahead.result(), pool.submit(read)
            return compiled(state, rows)

        state, (loss, _) = advance(state)
        float(loss)
        tell(first_update=since_start())
        while told_to_go():
            begun = time.perf_counter()
            done, value = 0, 0.0
            while not done or not turn_over(begun):
                for _ in range(steps):
                    state, (loss, _) = advance(state)
                done, value = done + steps, float(loss)
            memory = jax.devices()[0].memory_stats() or {}
            tell(
                seconds=time.perf_counter() - begun,
                updates=done,
                peak=memory.get("peak_bytes_in_use", 0),
                loss=value,
                parameters=params,
            )
