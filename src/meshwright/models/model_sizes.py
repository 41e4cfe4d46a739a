"""Sizes and rates that must fit each other, checked without building a model."""

from typing import Any


def check_sizes(
    *,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv: str = "separate",
    image_size: int | None = None,
    patch_size: int | None = None,
    **others: Any,
) -> None:
    """Refuse sizes that do not divide, are too small, or do not go with each other."""
    for name, size in {**locals(), **others}.items():
        counts = name.startswith("num_") or name.endswith(("_size", "_length", "_dim"))
        if counts and isinstance(size, int) and size < 1:
            raise ValueError(f"{name}={size} is less than 1.")
        if name.endswith("dropout") and size is not None and not 0 <= size < 1:
            raise ValueError(f"{name}={size} is not a rate: write a number from 0 to below 1.")
    if head_dim is None and hidden_size and num_heads:
        _check_divides("hidden_size", hidden_size, "num_heads", num_heads)
    if num_heads and num_kv_heads:
        _check_divides("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    if head_dim and head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd, but positions rotate pairs of dims.")
    if qkv == "fused" and num_kv_heads not in (None, num_heads):
        raise ValueError(
            f"qkv='fused' needs as many key/value heads as query heads, but num_kv_heads="
            f"{num_kv_heads} and num_heads={num_heads}; write qkv='separate'."
        )
    if image_size and patch_size:
        _check_divides("image_size", image_size, "patch_size", patch_size)


def _check_divides(name: str, size: int, of: str, parts: int) -> None:
    if size % parts:
        fits = [n for n in range(1, size + 1) if size % n == 0]
        near = [max((n for n in fits if n < parts), default=1), *(n for n in fits if n > parts)]
        written = " or ".join(f"{of}={n}" for n in near[:2])
        raise ValueError(f"{name}={size} is not divisible by {of}={parts}; write {written}.")
