"""Times attention with a function of its scores, forwards and backwards, on one GPU.

For softcapped attention, ALiBi, a bias for each pair of positions, and sigmoid attention, all
causal and in bf16: (a) the operations as written, under jit; (b) the kernel that computes scores a
block at a time; (c) rows of queries one part after the other, by any product and by those of cuBLAS
alone; (d) cuDNN without the function of scores, a floor. Each runs for at least --seconds. Also:
the memory each needs besides operands and results, and the largest difference of the result and of
each gradient to the operations in float32, as a part of the largest value.

    python benchmarks/gpu_scores.py [--shapes 8x1024x16x64,8x4096x16x128] [--kinds softcap,alibi]
    python benchmarks/gpu_scores.py --shapes 4x4096x8x256 --tiles 64x32x8x2,64x32x8x2,32x64x8x2
    python benchmarks/gpu_scores.py --tiny                  # on a CPU, not recorded

Without --tiles, the kernel is left out for heads that it is not used for. Rows of kinds and shapes
that are not measured again stay in the record.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpu_peers import gpu_name
from record import read_record, write_record

from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import needed_equations
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.kernels.attention_by_rows import rows_attention
from meshwright.program.kernels.block_attention import Tile, block_attention
from meshwright.program.kernels.fused_attention import CHANNELS, run_attention
from meshwright.program.kernels.match_attention import makes_weights, match_attention
from meshwright.program.kernels.surroundings import Scope
from meshwright.program.trace.normalize import normalize

KINDS = ("softcap", "alibi", "bias", "sigmoid")
SHAPES = "8x1024x16x64,8x4096x16x128"
Attention = Callable[..., Any]


def written(kind: str) -> Attention:
    """Return attention as people write it, of q, k, v [B, T, H, C] and a bias [H, T, T]."""

    def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
        length, heads, channels = q.shape[1:]
        scores = jnp.einsum("bthc,bshc->bhts", q, k) / channels**0.5
        if kind == "softcap":
            scores = 30 * jnp.tanh(scores / 30)
        if kind == "alibi":
            slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
            back = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
            scores = scores + (slopes[:, None, None] * back).astype(scores.dtype)
        if kind == "bias":
            scores = scores + bias
        seen = jnp.tril(jnp.ones((length, length), bool))
        if kind == "sigmoid":
            weights = jnp.where(seen, jax.nn.sigmoid(scores - jnp.log(length)), 0)
        else:
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        return jnp.einsum("bhts,bshc->bthc", weights.astype(v.dtype), v)

    return attention


def matched(kind: str, operands: Any) -> tuple[Any, Callable[[Attention], Attention]]:
    """Return what is read of an attention, and how to run it by another form."""
    closed = normalize(jax.make_jaxpr(written(kind))(*operands))
    jaxpr, consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    scope = Scope(ProgramDims(jaxpr, "", 1), consts)
    (match,) = [m for end in makes_weights(scope.graph) if (m := match_attention(scope, end))]
    own, made = match.operands, scope.graph.maker[match.output]
    before = needed_equations(jaxpr.eqns, own.inputs)
    after = needed_equations(jaxpr.eqns[made + 1 :], jaxpr.outvars)

    def by(attend: Attention) -> Attention:
        def run(*given: Any) -> Any:
            values = {**consts, **dict(zip(jaxpr.invars, given, strict=True))}
            Evaluator().extend(values, before)
            values[match.output] = run_attention(own, attend, *(values[v] for v in own.inputs))
            Evaluator().extend(values, after)
            return values[jaxpr.outvars[0]]

        return run

    return own, by


def differentiated(attention: Attention) -> Callable[..., Any]:
    """Return a function of q, k, v, a bias and a cotangent to the result and three gradients."""

    def run(q: Any, k: Any, v: Any, bias: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, bias), q, k, v)
        return out, *pull(cotangent)

    return run


def cudnn(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Return causal attention without a function of scores."""
    how = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)


def arrays(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """Return q, k, v, a bias and a cotangent."""
    _, length, heads, _ = shape
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, given = (jax.random.normal(key, shape, jnp.float32) for key in keys[:4])
    bias = jax.random.normal(keys[4], (heads, length, length), jnp.float32)
    return [a.astype(dtype) for a in (2 * q, k, v, bias, given)]


def sustained(compiled: Any, given: list[Any], seconds: float) -> float:
    """Return the milliseconds of a call, of as many as fit."""
    jax.block_until_ready(compiled(*given))
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        for _ in range(8):
            result = compiled(*given)
        jax.block_until_ready(result)
        count += 8
    return 1e3 * passed / count


def differences(found: Any, exact: Any) -> list[float]:
    """Return the largest differences, as parts of the largest values."""
    pairs = zip(found, exact, strict=True)
    parts = [jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max() for a, b in pairs]
    return [float(f"{float(part):.2g}") for part in parts]


def compare(
    kind: str, shape: tuple[int, ...], seconds: float, floor: Any, tiles: Sequence[Tile]
) -> dict[str, Any]:
    """Return the figures of one kind and shape."""
    given = arrays(shape, jnp.bfloat16)
    own, by = matched(kind, given[:4])
    interpret = jax.default_backend() != "gpu"
    rows = rows_attention(own.function, own.allowed)
    forms = {"written": None, "rows": rows, "rows by cuBLAS": rows}
    if tiles or shape[-1] in CHANNELS:
        forms["kernel"] = block_attention(own.function, own.allowed, tiles, interpret=interpret)
    row: dict[str, Any] = {"kind": kind, "shape": list(shape), "cudnn ms": floor}
    _, by_one = matched(kind, (given[0][:1], given[1][:1], given[2][:1], given[3]))
    small = [a if n == 3 else a[:1] for n, a in enumerate(given)]
    with jax.default_matmul_precision("highest"):
        wide = [a.astype(jnp.float32) for a in small]
        exact = jax.jit(differentiated(written(kind)))(*wide)
    for name, attend in forms.items():
        attention = written(kind) if attend is None else by(attend)
        of_one = jax.jit(differentiated(attention if attend is None else by_one(attend)))
        row[f"{name} differs"] = differences(of_one(*small), exact)
        by_cublas = name == "rows by cuBLAS" and not interpret
        lowered = jax.jit(differentiated(attention)).lower(*given)
        compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False} if by_cublas else {})
        row[f"{name} MB"] = round(compiled.memory_analysis().temp_size_in_bytes / 1e6)
        row[f"{name} ms"] = round(sustained(compiled, given, seconds), 3)
    best = row.get("kernel ms", min(row["rows ms"], row["rows by cuBLAS ms"]))
    row["times as fast"] = round(row["written ms"] / best, 2)
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shapes", default=SHAPES, help="samples x length x heads x channels")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tiles", default="", help="queries x keys x warps x stages, three times")
    parser.add_argument("--tiny", action="store_true", help="for trying it out")
    options = parser.parse_args()
    names = "2x1024x2x16" if options.tiny else options.shapes
    shapes = [tuple(int(n) for n in name.split("x")) for name in names.split(",")]
    kinds, seconds = options.kinds.split(","), 0.01 if options.tiny else options.seconds
    tiles = [Tile(*map(int, tile.split("x"))) for tile in options.tiles.split(",") if tile]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        given = arrays(shape, jnp.bfloat16)
        compiled = jax.jit(differentiated(cudnn)).lower(*given).compile()
        floor = round(sustained(compiled, given, seconds), 3)
        rows += [compare(kind, shape, seconds, floor, tiles) for kind in kinds]
    if gpu_name() and not options.tiny:
        measured = [(row["kind"], row["shape"]) for row in rows]
        kept = read_record("gpu_scores").get("rows", [])
        rows = [row for row in kept if (row["kind"], row["shape"]) not in measured] + rows
        write_record("gpu_scores", {"gpu": gpu_name(), "rows": rows})


if __name__ == "__main__":
    main()
