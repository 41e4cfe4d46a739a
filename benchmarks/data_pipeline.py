"""Measures whether training waits for data: tokens on disk, batches of 256 × 1024 tokens.

A step is a sleep of 20 ms in place of computation; the time the loop then waits for the next batch
is the cost of reading. The first steps, while the buffer fills, are not counted. The baseline
returns the same batch every time: it measures the hand-over and the load on the machine.

    python benchmarks/data_pipeline.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from record import verdict, write_record

from meshwright.data.indexed_data import SourceData
from meshwright.data.loader import load_batches
from meshwright.data.protocols import Data
from meshwright.data.token_rows import PackedRows
from meshwright.data.tokens import token_source
from meshwright.data.user_data import as_data

BATCH, LENGTH, VOCABULARY = 256, 1024, 50_257
TOKENS = 2**28
"""Half a gigabyte on disk."""
STEP_SECONDS = 0.020
WARM_UP, STEPS = 20, 500
NOTICED = 1e-3
"""Waits of at least this many seconds are counted."""
MAX_QUEUED = 0.01
"""Largest share of the time that may be spent waiting."""


def write_tokens(folder: Path) -> Path:
    random = np.random.default_rng(0)
    path = folder / "tokens.npy"
    tokens = np.lib.format.open_memmap(path, "w+", np.uint16, (TOKENS,))
    for start in range(0, TOKENS, 2**24):
        tokens[start : start + 2**24] = random.integers(0, VOCABULARY, 2**24, np.uint16)
    tokens.flush()
    return path


def pipelines(path: Path) -> Iterator[tuple[str, Data, dict[str, int]]]:
    """Yield what to measure: a name, the data and the prefetching options."""
    settings: Any = {"path": str(path), "sequence_length": LENGTH, "vocab_size": VOCABULARY}
    ready = {"tokens": np.zeros((BATCH, LENGTH + 1), np.int32)}
    yield "baseline", as_data(lambda step, batch_size: ready), {}
    plain = SourceData(token_source(**settings), 0)
    yield "token rows", plain, {}
    yield "token rows, 1 process", plain, {"workers": 1}
    ends = token_source(**settings, separator=0)
    yield "token rows, separate documents", SourceData(ends, 0), {}
    tokens = np.load(path, mmap_mode="r")
    lengths = np.random.default_rng(1).geometric(1 / 500, TOKENS // 600)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    boundaries = boundaries[boundaries < TOKENS]
    yield "packed documents", SourceData(PackedRows(tokens, boundaries, LENGTH, "packed"), 0), {}


def measure(data: Data, ahead: dict[str, int]) -> dict[str, Any]:
    """Return how long the loop waited for batches: share of the time, count, median, longest."""
    waits: list[float] = []
    read = time.process_time()
    with load_batches(data, batch_size=BATCH, stop=WARM_UP + STEPS, **ahead) as stream:
        for _ in range(WARM_UP + STEPS):
            asked = time.perf_counter()
            batch = next(stream)
            waits.append(time.perf_counter() - asked)
            assert batch["tokens"].shape == (BATCH, LENGTH + 1)
            time.sleep(STEP_SECONDS)
    read = time.process_time() - read
    counted = waits[WARM_UP:]
    return {
        "wait_share": round(sum(counted) / (sum(counted) + STEPS * STEP_SECONDS), 5),
        "waits_noticed": sum(wait >= NOTICED for wait in counted),
        "longest_wait_ms": round(max(counted) * 1e3, 3),
        "median_wait_ms": round(statistics.median(counted) * 1e3, 3),
        "cpu_ms_per_batch": round(read / (WARM_UP + STEPS) * 1e3, 2),
    }


def main() -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, data, ahead in pipelines(write_tokens(Path(folder))):
            found[name] = measure(data, ahead)
            print(f"{name:30}{found[name]}")
    share = found["token rows"]["wait_share"]
    share -= found["baseline"]["wait_share"]
    target = f"at most {MAX_QUEUED:.0%} of the time: {verdict(share, MAX_QUEUED)}"
    write_record(
        "data_pipeline",
        {
            "settings": {
                "batch": [BATCH, LENGTH],
                "step_ms": STEP_SECONDS * 1e3,
                "steps": STEPS,
                "warm_up": WARM_UP,
                "tokens_on_disk": TOKENS,
            },
            "pipelines": found,
            "targets": {"waiting for token rows, in excess of the baseline": target},
        },
    )


if __name__ == "__main__":
    main()
