"""Measures what the trainer adds to its step: metrics, trackers, background checkpoints.

A run of the whole trainer (metrics every 10 steps, JSONL and TensorBoard, checkpoints)
alternates with blocks of the bare compiled step, in one process, so that load on the machine
affects both equally. Every other block of the trainer contains a checkpoint, which starts in its
middle; what such a block takes longer is the cost of a save. Afterwards, a save is compared with a
synchronous save of the same state, and so is the last save of a run that saves twice at its end:
how long it takes from the last step to the end, and what of that is for the save before it.

    python benchmarks/trainer_overhead.py

gpu_trainer_overhead.py does the same for GPT-2 on a GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from record import median_interval, verdict, write_record

import meshwright as mw
from meshwright.step.canonical import CanonicalForm
from meshwright.trainer import training_run

LOG_EVERY = 10
BATCH, WIDTH, DEPTH = 1024, 384, 6
WITHIN, BLOCKED, SAVE_MS = 1.02, 0.20, 100.0
"""Limits: the lower bound of trainer / bare step; the time a save blocks / a synchronous save; the
milliseconds that steps lose to a save."""


@dataclass(frozen=True)
class Work:
    """What is trained, and for how long.

    Attributes:
        trainer: the trainer.
        data: the batch of every step.
        pairs: how often trainer and bare step take turns; every other time, a checkpoint is saved
            in the middle of the trainer's turn.
        block: steps of a turn.
    """

    trainer: mw.Trainer
    data: dict[str, Any]
    pairs: int = 20
    block: int = 50


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        """Pass x [B, D] through all layers."""
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


class Alternating:
    """A loader that gives the trainer a block of batches, then runs as many bare steps."""

    waited = 0.0

    def __init__(self, run: Any, state: Any, batch: list[Any], work: Work) -> None:
        self._run, self._state, self._batch, self._work = run, state, batch, work
        self.last: Any = None
        self.trainer: list[float] = []
        self.bare: list[float] = []

    @contextmanager
    def open(self, start: int, stop: int | None, on_end: Any) -> Iterator[Iterator[list[Any]]]:
        """Yield the batches of the trainer's blocks."""
        yield self._batches()

    def step(self, state: Any, batch: list[Any]) -> Any:
        """Run the trainer's step and remember its metrics, to wait for them later."""
        result = self._run(state, batch)
        self.last = result[1]
        return result

    def _batches(self) -> Iterator[list[Any]]:
        # Half a block first, so that checkpoints start in the middle of every other block.
        for _ in range(self._work.block // 2):
            yield self._batch
        for _ in range(self._work.pairs):
            jax.block_until_ready(self.last)
            started = time.perf_counter()
            for _ in range(self._work.block):
                yield self._batch
            jax.block_until_ready(self.last)
            self.trainer.append((time.perf_counter() - started) / self._work.block)
            self.bare.append(self._bare())
        # One more, whose request ends the last turn.
        yield self._batch

    def _bare(self) -> float:
        started = time.perf_counter()
        metrics = None
        for _ in range(self._work.block):
            self._state, metrics = self._run(self._state, self._batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - started) / self._work.block


def measure(folder: Path, work: Work) -> dict[str, Any]:
    """Run the pairs and the saves."""
    data, block = work.data, work.block
    loaders: list[Alternating] = []

    def loader(*_: Any, **__: Any) -> Alternating:
        return loaders[0]

    training_run.BatchLoader = loader  # type: ignore[assignment,misc]
    compile_step = training_run.compile_step

    def compiled(assembled: Any, batch: Any, **others: Any) -> Any:
        step = compile_step(assembled, batch, **others)
        placed = [jax.device_put(v, assembled.step.shardings.batch) for v in data.values()]
        loaders.append(Alternating(step.run, assembled.init(1), placed, work))
        return step.__class__(**{**vars(step), "run": loaders[0].step})

    training_run.compile_step = compiled
    result = replace(work.trainer, log_every=LOG_EVERY).fit(
        data,
        batch_size=len(next(iter(data.values()))),
        steps=block // 2 + work.pairs * block + 1,
        run_dir=folder,
        tracking=mw.TrackingConfig(tensorboard=True),
        checkpoint=mw.CheckpointConfig(every=2 * block),
    )
    return {
        "trainer_ms": [1e3 * t for t in loaders[0].trainer],
        "bare_ms": [1e3 * t for t in loaders[0].bare],
        "blocked_ms": blocked(folder),
        "synchronous_ms": [1e3 * t for t in synchronous(result, folder)],
        "end": at_the_end(folder),
    }


def at_the_end(folder: Path) -> dict[str, float]:
    """Return what the last save took, and how long it and the one before it held up the end."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    last = [e for e in events if e["kind"] == "checkpoint"][-1]
    ms = {name: 1e3 * last[f"{name}seconds"] for name in ("", "blocked_", "waited_")}
    own = ms["blocked_"] - ms["waited_"] + ms[""]
    return {"last_save_ms": round(own, 1), "for_the_save_before_ms": round(ms["waited_"], 1)}


def blocked(folder: Path) -> list[float]:
    """Return how long each save blocked the training loop, in milliseconds."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [1e3 * e["blocked_seconds"] for e in events if e["kind"] == "checkpoint"]


def synchronous(result: Any, folder: Path) -> list[float]:
    """Return how long synchronous saves of the same state take, in seconds.

    Each saves a new copy on the device: JAX keeps what was copied to the host once.
    """
    times = []
    with ocp.StandardCheckpointer() as checkpointer:
        for number in range(5):
            state = CanonicalForm(result.assembled).copy(result.state)
            jax.block_until_ready(state)
            started = time.perf_counter()
            checkpointer.save(folder / f"synchronous{number}", state)
            checkpointer.wait_until_finished()
            times.append(time.perf_counter() - started)
    return times


def report(work: Work) -> dict[str, Any]:
    """Measure, print, and return the figures to record."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), work)
    pairs = list(zip(found["trainer_ms"], found["bare_ms"], strict=True))
    ratio, low, high = median_interval([a / b for a, b in pairs[::2]])
    bare = statistics.median(found["bare_ms"])
    # What a turn with a save takes longer than one without.
    saved = work.block * statistics.median(a - ratio * b for a, b in pairs[1::2])
    held, whole = (statistics.median(found[n]) for n in ("blocked_ms", "synchronous_ms"))
    print(f"bare step     {bare:8.1f} ms, {work.pairs} pairs of blocks of {work.block}")
    print(f"trainer       {ratio:8.3f} × bare step (95%: {low:.3f} to {high:.3f}), lower bound at "
          f"most {WITHIN}: {verdict(low, WITHIN)}")  # fmt: skip
    print(f"a save costs  {saved:8.1f} ms of step time, at most {SAVE_MS:.0f} ms: "
          f"{verdict(saved, SAVE_MS)}")  # fmt: skip
    end = found["end"]["last_save_ms"]
    print(f"the last save {end:8.1f} ms, at most a synchronous one ({whole:.0f} ms): "
          f"{verdict(end, whole)}; for the save before it "
          f"{found['end']['for_the_save_before_ms']:.0f} ms more")  # fmt: skip
    each = ", ".join(f"{ms:.0f}" for ms in found["synchronous_ms"])
    print(f"synchronous   {each} ms")
    print(f"a save blocks {held:8.1f} ms, {held / whole:.1%} of a synchronous save "
          f"({whole:.0f} ms), at most {BLOCKED:.0%}: {verdict(held / whole, BLOCKED)}")  # fmt: skip
    return {
        "pairs": work.pairs,
        "updates_per_block": work.block,
        "bare_step_ms": round(bare, 2),
        "ratio": round(ratio, 4),
        "ratio_95": [round(low, 4), round(high, 4)],
        "save_costs_ms": round(saved, 1),
        "save_blocks_ms": round(held, 2),
        "synchronous_save_ms": round(whole, 1),
        "save_blocks_share": round(held / whole, 4),
        **found["end"],
        "targets": {
            "lower bound of the ratio of trainer to bare step": f"at most {WITHIN}: "
            + verdict(low, WITHIN),
            "milliseconds that steps lose to a save": f"at most {SAVE_MS:.0f}: "
            + verdict(saved, SAVE_MS),
            "the last save, compared with a synchronous one": verdict(end, whole),
            "time a save blocks the loop, relative to a synchronous save": (
                f"at most {BLOCKED:.0%}: {verdict(held / whole, BLOCKED)}"
            ),
        },
    }


def main() -> None:
    """Measure on a CPU, print, record."""
    jax.config.update("jax_platforms", "cpu")
    trainer = mw.Trainer(
        model=Net, loss=loss, optimizer=optax.adamw(1e-4), log_every=LOG_EVERY, mesh="data=1"
    )
    data = {"x": np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")}
    write_record("trainer_overhead", report(Work(trainer, data)))


if __name__ == "__main__":
    main()
