"""What gpu_generate.py measures besides our models: a decoder of a user, and one for speed alone.

`UserDecoder` is plain Flax, nothing from Meshwright. `HandWritten` is plain JAX with a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class UserBlock(nnx.Module):
    """Grouped attention, rotary positions and a gated MLP, written out. [B, T, D] → [B, T, D]."""

    def __init__(self, sizes: Mapping[str, Any], *, rngs: nnx.Rngs):
        width, self.head_dim = sizes["hidden_size"], sizes["head_dim"]
        self.heads, self.kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        self.base = sizes["rope_base"]

        def linear(size: int, out: int) -> nnx.Linear:
            return nnx.Linear(size, out, use_bias=False, rngs=rngs)

        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.query = linear(width, self.heads * self.head_dim)
        self.key = linear(width, self.kv_heads * self.head_dim)
        self.value = linear(width, self.kv_heads * self.head_dim)
        self.out = linear(self.heads * self.head_dim, width)
        self.gate, self.up = linear(width, sizes["mlp_size"]), linear(width, sizes["mlp_size"])
        self.down = linear(sizes["mlp_size"], width)

    def rotate(self, x: Array) -> Array:
        """Turn pairs of channels of x [B, T, H, C] by their position."""
        frequencies = self.base ** (-jnp.arange(0, self.head_dim, 2) / self.head_dim)
        angles = jnp.arange(x.shape[1])[:, None] * frequencies
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)

    def attend(self, x: Array) -> Array:
        """Mix the positions of x."""
        batch, length, _ = x.shape
        query = self.rotate(self.query(x).reshape(batch, length, self.heads, -1))
        key = self.rotate(self.key(x).reshape(batch, length, self.kv_heads, -1))
        value = self.value(x).reshape(batch, length, self.kv_heads, -1)
        key, value = (jnp.repeat(a, self.heads // self.kv_heads, axis=2) for a in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores * self.head_dim**-0.5, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.out(mixed.reshape(batch, length, -1))

    def __call__(self, x: Array) -> Array:
        """Add both halves to x."""
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class UserDecoder(nnx.Module):
    """A decoder of the form of Llama; its embedding is also the output layer."""

    def __init__(self, *, rngs: nnx.Rngs, **sizes: Any):
        self.context_length = sizes["context_length"]
        self.tokens = nnx.Embed(sizes["vocab_size"], sizes["hidden_size"], rngs=rngs)
        blocks = range(sizes["num_blocks"])
        self.blocks = nnx.List([UserBlock(sizes, rngs=rngs) for _ in blocks])
        self.norm = nnx.RMSNorm(sizes["hidden_size"], rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return logits [B, T, V] for tokens [B, T]."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


class HandWritten:
    """Greedy decoding of the same shapes in one program, with joined weights and a fixed cache.

    Args:
        sizes: of the model.
        prompt: tokens of each prompt.
        new: tokens to generate.
    """

    def __init__(self, sizes: Mapping[str, Any], prompt: int, new: int) -> None:
        self.sizes, self.prompt, self.new = sizes, prompt, new
        self.cudnn = jax.default_backend() == "gpu"
        self.generate = jax.jit(self._generate)

    def weights(self) -> dict[str, Any]:
        """Return random weights in bf16."""
        s = self.sizes
        width, head_dim, mlp = s["hidden_size"], s["head_dim"], s["mlp_size"]
        queries, keys = s["num_heads"] * head_dim, s["num_kv_heads"] * head_dim
        shapes = {
            "qkv": (width, queries + 2 * keys),
            "out": (queries, width),
            "gate_up": (width, 2 * mlp),
            "down": (mlp, width),
        }
        keys_of = iter(jax.random.split(jax.random.key(0), 1 + 4 * s["num_blocks"]))

        def normal(shape: tuple[int, ...]) -> Array:
            return 0.02 * jax.random.normal(next(keys_of), shape, jnp.bfloat16)

        ones = jnp.ones(width, jnp.bfloat16)
        blocks = [
            {name: normal(shape) for name, shape in shapes.items()} | {"n1": ones, "n2": ones}
            for _ in range(s["num_blocks"])
        ]
        return {"blocks": blocks, "tokens": normal((s["vocab_size"], width)), "norm": ones}

    def _generate(self, weights: Any, prompts: Array) -> Array:
        rows, s = prompts.shape[0], self.sizes
        shape = (rows, s["num_kv_heads"], self.prompt + self.new, s["head_dim"])
        empty = [(jnp.zeros(shape, jnp.bfloat16),) * 2 for _ in weights["blocks"]]
        first, caches = self._read(weights, prompts, empty, 0)

        def one(carry: Any, step: Array) -> Any:
            token, caches = carry
            following, caches = self._read(weights, token[:, None], caches, self.prompt + step)
            return (following, caches), token

        steps = jnp.arange(self.new)
        return jax.lax.scan(one, (first, caches), steps)[1].T

    def _read(self, weights: Any, tokens: Array, caches: Any, start: Any) -> Any:
        """Return the likeliest tokens after these, and the caches with them."""
        x, kept = weights["tokens"][tokens], []
        for block, cache in zip(weights["blocks"], caches, strict=True):
            mixed, cache = self._attend(block, _normed(x, block["n1"]), cache, start)
            x = x + mixed
            gate, up = jnp.split(_normed(x, block["n2"]) @ block["gate_up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ block["down"]
            kept.append(cache)
        logits = _normed(x[:, -1], weights["norm"]) @ weights["tokens"].T
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), kept

    def _attend(self, block: Any, x: Array, cache: Any, start: Any) -> Any:
        rows, count, _ = x.shape
        heads, groups, head_dim = (
            self.sizes[name] for name in ("num_heads", "num_kv_heads", "head_dim")
        )
        joined = (x @ block["qkv"]).reshape(rows, count, heads + 2 * groups, head_dim)
        query, key, value = jnp.split(joined, [heads, heads + groups], axis=2)
        at = start + jnp.arange(count)
        query, key = (_rotated(a, at, self.sizes["rope_base"]) for a in (query, key))
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), start, axis=2)
            for old, new in zip(cache, (key, value), strict=True)
        )
        if count > 1:
            how = "cudnn" if self.cudnn else None
            mixed = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=how
            )
        else:
            grouped = query.reshape(rows, groups, heads // groups, head_dim)
            scores = jnp.einsum("bkgc,bksc->bkgs", grouped, keys).astype(jnp.float32)
            seen = jnp.arange(keys.shape[2]) <= start
            scores = jnp.where(seen, scores * head_dim**-0.5, -jnp.inf)
            shares = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
            mixed = jnp.einsum("bkgs,bksc->bkgc", shares, values)
        return mixed.reshape(rows, count, -1) @ block["out"], (keys, values)


def _normed(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def _rotated(x: Array, positions: Array, base: float) -> Array:
    size = x.shape[-1]
    angles = positions[:, None] * base ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
