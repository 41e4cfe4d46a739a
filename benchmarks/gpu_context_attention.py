"""Times one device's part of causal attention on a `context` axis, beside attention to a whole row.

Positions are not exchanged: the keys of all devices are here, as they are once they are gathered.
The numbers are compared with those of a whole row, on a shorter one.

With --steps, the step of one of eight devices is rehearsed instead, for two blocks of Llama 3 8B
and 131,072 tokens, and beside it the step of one device with the whole row: what it takes of its
share of the time, and its memory beside what is planned. What is sent takes no time here.

    python benchmarks/gpu_context_attention.py
    python benchmarks/gpu_context_attention.py --steps
    python benchmarks/gpu_context_attention.py --tiny [--steps]    # on CPUs, to try it out
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gpu_peers import gpu_name
from jax.sharding import AxisType, PartitionSpec
from record import read_record, verdict, write_record

from meshwright.program.kernels.fused_attention import (
    cudnn_attention,
    cudnn_part,
    xla_attention,
    xla_part,
)
from meshwright.program.kernels.joined_attention import SharedRows, differentiable
from meshwright.program.kernels.masks import Allowed

HEADS, KV_HEADS, CHANNELS, CONTEXT = 32, 8, 128, 8
SCALE = CHANNELS**-0.5
AT_MOST = 1.15
"""What the attention of a part may take of its share of the time."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", action="store_true")
    options = parser.parse_args()
    tiny: bool = options.tiny
    earlier = read_record("gpu_context_attention")
    figures = measure_steps(tiny) if options.steps else measure_attention(tiny)
    print(figures)
    if not tiny:
        kept = ("heads", "context", "targets", "rows", "difference", "steps")
        old = {key: earlier[key] for key in kept if key in earlier}
        write_record("gpu_context_attention", {"gpu": gpu_name(), **old, **figures})


def measure_attention(tiny: bool) -> dict[str, Any]:
    """Return the figures of attention alone."""
    length, short = (512, 256) if tiny else (131072, 8192)
    forms = (xla_attention, xla_part) if tiny else (cudnn_attention, cudnn_part)
    rows = [measure(length, window, *forms) for window in (None, length // 32)]
    return {
        "heads": {"queries": HEADS, "keys": KV_HEADS, "channels": CHANNELS},
        "context": CONTEXT,
        "targets": {
            f"attention of a part: at most {AT_MOST} of its share": "{} ({:.2f})".format(
                verdict(rows[0]["over_share"], AT_MOST), rows[0]["over_share"]
            )
        },
        "rows": rows,
        "difference": [compare(short, window, *forms) for window in (None, short // 8)],
    }


def measure_steps(tiny: bool) -> dict[str, Any]:
    """Return the figures of whole steps: of one device of the axis, and of a device by itself."""
    from gpu_memory import rehearse

    words = ("model=llama3_tiny", "data.sequence_length=512", "model.context_length=512")
    if not tiny:
        words = ("model=llama3_8b", "model.num_blocks=2", "data.sequence_length=131072")
    words = (*words, "training.micro_batch_size=1", "sharding.remat=full")
    on = "cpu" if tiny else "gpu"
    part = rehearse((*words, f"mesh.context={CONTEXT}"), on)
    print(part, flush=True)
    whole = rehearse(words, on)
    steps = {"part": part, "whole": whole}
    if "compute_seconds" in part:
        share = whole["compute_seconds"] / CONTEXT
        steps["over_share"] = round(part["compute_seconds"] / share, 3)
    return {"steps": steps}


def measure(
    length: int, window: int | None, attention: Callable[..., Any], part: Callable[..., Any]
) -> dict[str, Any]:
    """Return the times of a whole row and of one device's part of it, forward and backward."""
    shared = SharedRows(CONTEXT, length // CONTEXT, window)
    held = length if window is None else shared.own + shared.halo
    whole = seconds(functools.partial(alone, attention, window), length, length)
    joined = functools.partial(of_device, shared, part)
    own = seconds(joined, length // CONTEXT, held)
    return {
        "positions": length,
        "window": window,
        "whole_row_s": whole,
        "one_device_s": own,
        "over_share": own * CONTEXT / whole,
    }


def compare(
    length: int, window: int | None, attention: Callable[..., Any], part: Callable[..., Any]
) -> float:
    """Return the largest difference of results and gradients on one device, over the largest."""
    one = SharedRows(1, length, window)
    before = 0 if window is None else one.halo

    def joined(query: Any, key: Any, value: Any) -> Any:
        held = (jnp.pad(x, ((0, 0), (before, 0), (0, 0), (0, 0))) for x in (key, value))
        return of_device(one, part, query, *held)

    arrays = operands(length, length)
    found = jax.jit(gradients(joined))(*arrays)
    expected = jax.jit(gradients(functools.partial(alone, attention, window)))(*arrays)
    pairs = [[x.astype(jnp.float32) for x in pair] for pair in zip(found, expected, strict=True)]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def alone(attention: Callable[..., Any], window: int | None, *arrays: Any) -> Any:
    return attention(Allowed(0, window), SCALE)(*arrays, None)


def of_device(shared: SharedRows, part: Callable[..., Any], *arrays: Any) -> Any:
    """Attend as the first device of an axis does, with the keys that it has fetched."""
    attend = differentiable(shared.join(functools.partial(part, scale=SCALE)))
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    spec = PartitionSpec()
    run = jax.shard_map(
        lambda *arrays: attend(*arrays, None),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return run(*arrays)


def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any) -> Any:
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(jnp.sin(query))

    return run


def operands(queries: int, keys: int) -> list[Any]:
    shapes = [(1, queries, HEADS), (1, keys, KV_HEADS), (1, keys, KV_HEADS)]
    seeds = jax.random.split(jax.random.key(0), 3)
    draws = zip(seeds, shapes, strict=True)
    return [jax.random.normal(seed, (*shape, CHANNELS), jnp.bfloat16) for seed, shape in draws]


def seconds(attend: Callable[..., Any], queries: int, keys: int) -> float:
    """Return the median time of attention with its gradient."""
    run, arrays = jax.jit(gradients(attend)), operands(queries, keys)
    jax.block_until_ready(run(*arrays))
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
