"""Measures what checksums add to a save: the same state is saved with and without them, in turn.

The state has the arrays of a model with AdamW, 200 MB in all. Saves alternate in one process, so
that load on the machine affects both equally; which of the two comes first alternates as well.

    python benchmarks/checkpoint_checksums.py
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

from record import median_interval, verdict, write_record

from meshwright.checkpoint import CheckpointMetadata, CheckpointStore, checksum_item

PAIRS = 40
LAYERS, WIDTH = 16, 1024
WITHIN = 1.05
"""Limit: the upper bound of save with checksums / save without, so that noise cannot pass it."""


def make_state() -> dict[str, dict[str, jax.Array]]:
    """Return parameters and two moments of AdamW, as a checkpoint has them."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {
        f"layers.{n}.kernel": jax.random.normal(k, (WIDTH, WIDTH)) for n, k in enumerate(keys)
    }
    moments = {f"0.{m}.{path}": 0.1 * p for m in ("mu", "nu") for path, p in params.items()}
    return jax.block_until_ready({"params": params, "state": {}, "optimizer": moments})


@contextmanager
def without_checksums() -> Iterator[None]:
    """Let a save sum up nothing."""
    sums_of = checksum_item.sums_of
    checksum_item.sums_of = lambda groups, *, main=True: {}
    try:
        yield
    finally:
        checksum_item.sums_of = sums_of


def save(store: CheckpointStore, state: Any, step: int) -> tuple[float, float]:
    """Save once; return the seconds until everything is on disk, and those of processor time."""
    metadata = CheckpointMetadata(step=step, global_batch_size=8, seed=0, plan={}, config={})
    started, worked = time.perf_counter(), time.process_time()
    store.save(state, metadata)
    saved = store.wait()
    seconds = time.perf_counter() - started, time.process_time() - worked
    assert saved is not None
    assert saved.error is None, saved
    shutil.rmtree(store.folder / str(step), ignore_errors=True)
    return seconds


def cpu_seconds(state: Any) -> float:
    """Return the processor time of the sums alone, which run beside the writing."""
    times = []
    for _ in range(5):
        started = time.process_time()
        checksum_item.sums_of(state)
        times.append(time.process_time() - started)
    return statistics.median(times)


def measure(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of every save, in pairs."""
    state, times = make_state(), {"with": [], "without": []}
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    save(store, state, 1)
    for pair in range(PAIRS):
        kinds = ("with", "without") if pair % 2 else ("without", "with")
        for place, kind in enumerate(kinds):
            step = 2 + 2 * pair + place
            if kind == "with":
                times[kind].append(save(store, state, step))
                continue
            with without_checksums():
                times[kind].append(save(store, state, step))
    store.close()
    return times


def compare(times: dict[str, list[tuple[float, float]]], which: int) -> dict[str, Any]:
    """Return the medians with and without checksums, and their ratio over the pairs."""
    both = {kind: [each[which] for each in saves] for kind, saves in times.items()}
    pairs = zip(both["with"], both["without"], strict=True)
    ratio, low, high = median_interval([a / b for a, b in pairs])
    return {
        "ms": {kind: round(1e3 * statistics.median(each), 1) for kind, each in both.items()},
        "ratio": round(ratio, 4),
        "ratio_95": [round(low, 4), round(high, 4)],
    }


def main() -> None:
    """Measure, print, record."""
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder))
    found = {"time": compare(times, 0), "processor time": compare(times, 1)}
    state_bytes = 3 * LAYERS * WIDTH * WIDTH * 4
    targets = {}
    for name, figures in found.items():
        high = figures["ratio_95"][1]
        what = f"upper bound of the ratio of a save with checksums to one without, {name}"
        targets[what] = f"at most {WITHIN}: {verdict(high, WITHIN)}"
        print(f"{name:15} {figures['ratio']:.3f} × (95%: {figures['ratio_95']}), upper bound "
              f"{targets[what]}")  # fmt: skip
    write_record(
        "checkpoint_checksums",
        {
            "pairs": PAIRS,
            "state_bytes": state_bytes,
            "sums_cpu_ms": round(1e3 * cpu_seconds(make_state()), 1),
            "saves": found,
            "targets": targets,
        },
    )


if __name__ == "__main__":
    main()
