"""Compares models as users write them with a plain training loop, on one GPU.

Twelve models of plain_loop_models.py, none of which knows Meshwright, are trained three ways: by
`nnx.jit` in a loop (bf16 by their own dtype), by `mw.Trainer` with kernels=auto, and with
kernels=none (both precision=bf16). AdamW and clipping at norm 1.0 everywhere. Batches are random
and new in every step. Each way is a process of its own; they take turns, the first of which warms
up. Clocks and power are recorded. Where nothing can be replaced, kernels=none is the same program
and is not measured.

    python benchmarks/gpu_plain_loop.py [--only softcap,chunks] [--turns 3] [--seconds 20]
    python benchmarks/gpu_plain_loop.py --only nano --turns 2 --seconds 1      # on a CPU

Rows of models that are not measured again stay in the record.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_peers import gpu_name
from peer_power import PowerMeter
from peer_process import STEPS, TURNS, Worker, since_start, tell, told_to_go, turn_over

WAYS = ("plain", "auto", "none")
LOOK_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of models")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--turns", type=int, default=4, help="the first only warms up")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a turn lasts")
    parser.add_argument("--none-turns", type=int, default=0, help="turns of kernels=none")
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "CASE", "DATA"))
    parser.add_argument("--steps", type=int, default=LOOK_EVERY)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker[:2], options.steps)
        return
    from plain_loop_models import CASES

    names = [name for name in options.only.split(",") if name]
    names = names or [name for name in CASES if name != "nano"]
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(compare(name, options))
        if gpu_name():
            save(rows)


def work(way: str, name: str, steps: int) -> None:
    """Train a model one way, in turns."""
    from plain_loop_models import CASES

    (train_plain if way == "plain" else train_meshwright)(CASES[name], way, steps)


def batches(case: Any) -> Iterator[dict[str, Any]]:
    """Yield new batches for ever, made ahead in threads."""
    import numpy as np

    # A batch of images takes one core 0.2 s, and a step 0.03 s.
    workers = os.cpu_count() or 4
    with ThreadPoolExecutor(workers) as threads:
        seeds = iter(range(10**9))
        ahead = [
            threads.submit(lambda s: case.batch(np.random.default_rng(s)), next(seeds))
            for _ in range(2 * workers)
        ]
        while True:
            yield ahead.pop(0).result()
            ahead.append(
                threads.submit(lambda s: case.batch(np.random.default_rng(s)), next(seeds))
            )


def optimizer() -> Any:
    """Return what all ways train with."""
    import optax

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def train_plain(case: Any, way: str, steps: int) -> None:
    """Train as the Flax documentation does."""
    del way
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model = case.build(jnp.bfloat16, nnx.Rngs(0))
    trained = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, trained: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(case.loss)(model, batch)
        trained.update(model, gradients)
        return loss

    call = nnx.cached_partial(step, model, trained)
    source = batches(case)
    jax.block_until_ready(call(jax.device_put(next(source))))
    tell(first_update=since_start())
    while told_to_go():
        began, count = time.perf_counter(), 0
        while not count or not turn_over(began):
            losses = [call(jax.device_put(next(source))) for _ in range(steps)]
            jax.block_until_ready(losses)
            count += steps
        seconds = time.perf_counter() - began
        tell(seconds=seconds, updates=count, peak=peak(), loss=float(losses[-1]), kernels={})


def train_meshwright(case: Any, way: str, steps: int) -> None:
    """Train with `mw.Trainer`, the model as it is."""
    import meshwright as mw

    os.environ[STEPS], os.environ[TURNS] = str(steps), str(os.dup(1))
    sys.path.insert(0, str(Path(__file__).parent))
    from peer_turns import Turns

    trainer = mw.Trainer(
        model=lambda rngs: case.build(None, rngs),
        loss=case.loss,
        optimizer=optimizer(),
        precision="bf16",
        kernels=way,
        log_every=steps,
    )
    trainer.fit(batches(case), steps=10**6, callbacks=[Turns()])


def peak() -> int:
    """Return the most memory in use so far, in bytes."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def worker(way: str, name: str, options: argparse.Namespace) -> Worker:
    """Start a process."""
    script = Path(__file__)
    return Worker(way, name, script, options.steps, seconds=options.seconds, script=script)


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model every way, in turns, and return the figures."""
    workers = {way: worker(way, name, options) for way in options.ways.split(",")}
    for started in workers.values():
        assert started.first
    meter = PowerMeter()
    for turn in range(options.turns):
        for way, one in workers.items():
            if way != "none" or not options.none_turns or turn < options.none_turns:
                one.take_turn()
            if way == "none" and turn == 0 and not _replaced(workers["auto"]):
                one.end()
        if "none" in workers and not _replaced(workers["auto"]):
            workers.pop("none")
    meter.end()
    row: dict[str, Any] = {"case": name, "kernels": workers["auto"].turns[-1]["kernels"]}
    for way, one in workers.items():
        turns = one.turns[1:] or one.turns
        count = sum(turn["updates"] for turn in turns)
        seconds = sum(turn["seconds"] for turn in turns)
        row[way] = {
            "ms": round(seconds / count * 1e3, 2),
            "peak_gib": round(max(turn["peak"] for turn in turns) / 2**30, 2),
            "seconds": round(seconds, 1),
            "first_step_s": round(one.first, 1),
            **meter.during(turns, count),
        }
        one.end()
    for way in ("plain", "none"):
        if way in row:
            row[f"over_{way}"] = round(row[way]["ms"] / row["auto"]["ms"], 3)
    print(row, flush=True)
    return row


def _replaced(auto: Worker) -> bool:
    """Whether anything is evaluated by a kernel."""
    return any(not use.endswith("as written") for use in auto.turns[-1]["kernels"])


def save(rows: list[dict[str, Any]]) -> None:
    """Write the record: these rows, and those of models that were not measured again."""
    from plain_loop_models import CASES
    from record import read_record, verdict, write_record

    measured = {row["case"]: row for row in rows}
    kept = {row["case"]: row for row in read_record("gpu_plain_loop").get("rows", [])}
    shown = [{**kept, **measured}[name] for name in CASES if name in {**kept, **measured}]
    targets = {
        f"{row['case']}: at least the speed of {words}": (
            f"{verdict(row[key], 1.0, at_most=False)} ({row[key]})"
        )
        for row in shown
        for key, words in (("over_plain", "a plain loop"), ("over_none", "kernels=none"))
        if key in row
    }
    write_record("gpu_plain_loop", {"gpu": gpu_name(), "rows": shown, "targets": targets})


if __name__ == "__main__":
    main()
