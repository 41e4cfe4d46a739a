"""Runs a command line of Meshwright, and prints what its start spent its time on.

    python benchmarks/start_phases.py train model=gpt2 …

Lines have the seconds since the process began, the seconds of a phase, and the seconds of CPU of
its thread: where they differ, it waited. Phases inside another are indented; those of other threads
are named so. `gpu_start.py` runs it with a warm cache.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from meshwright.cli import request
from meshwright.cli.main import entry

PHASES = (
    ("meshwright.trainer.trainer", "Trainer.from_config", "recipe, data opened"),
    ("meshwright.trainer.starting.given_data", "first_batch", "first batch"),
    ("meshwright.trainer.trainer", "assemble", "assemble"),
    ("meshwright.step.assemble", "describe_model", "model's structure"),
    ("meshwright.step.assemble", "step_program", "trace of the loss"),
    ("meshwright.step.assemble", "decide_program", "decision, kernels"),
    ("meshwright.trainer.trainer", "TrainingRun", "checks"),
    ("meshwright.trainer.programs", "lower_step", "step: trace and lower, or read"),
    ("meshwright.step.train_step", "TrainStep._update", "trace of the step"),
    ("meshwright.compiled.compile_program", "key_of", "hash of the step's text"),
    ("meshwright.compiled.compile_program", "_compile", "compile or load"),
    ("meshwright.trainer.starting.restoring", "Restoring.prepare", "state"),
    ("meshwright.step.assemble", "trace_values", "trace of the model's values"),
    ("meshwright.step.assemble", "draw_leaves", "parameters"),
    ("meshwright.step.assemble", "start_from", "optimizer's state"),
    ("meshwright.trainer.programs", "read_ledger", "ledger"),
    ("meshwright.trainer.loop", "Loop.train", "training"),
    ("meshwright.trainer.loop", "Loop._log", "first step's numbers"),
)
"""Functions that are timed once the command is imported, and what they are called here."""

_found: list[tuple[float, int, str, float, float]] = []
_depth = threading.local()


def since_start() -> float:
    """Return the seconds since the process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    running = float(Path("/proc/uptime").read_text().split()[0])
    return running - ticks / os.sysconf("SC_CLK_TCK")


def timed(module: Any, path: str, name: str) -> None:
    """Replace a function by one that is timed."""
    owner = functools.reduce(getattr, path.split(".")[:-1], module)
    attribute = path.rpartition(".")[2]
    function = getattr(owner, attribute)
    thread = threading.main_thread()

    @functools.wraps(function, updated=())
    def measured(*args: Any, **named: Any) -> Any:
        depth = _depth.value = getattr(_depth, "value", -1) + 1
        begun, wall, cpu = since_start(), time.perf_counter(), time.thread_time()
        try:
            return function(*args, **named)
        finally:
            _depth.value -= 1
            took = time.perf_counter() - wall, time.thread_time() - cpu
            beside = "" if threading.current_thread() is thread else " (beside)"
            _found.append((begun, depth, name + beside, *took))

    setattr(owner, attribute, measured)


def show(line: str) -> None:
    """Print a line where the command does not print its result."""
    print(f"start: {line}", file=sys.stderr, flush=True)


def main() -> None:
    show(f"{since_start():6.2f} s until the command line is read")
    wait = request.keep_programs

    def imported(config: Any) -> None:
        show(f"{since_start():6.2f} s until the command is imported")
        wait(config)
        show(f"{since_start():6.2f} s until the devices are there")
        for module, path, name in PHASES:
            timed(importlib.import_module(module), path, name)

    timed(request, "make_request", "config, import of JAX")
    request.keep_programs = imported
    try:
        entry()
    finally:
        for begun, depth, name, wall, cpu in sorted(_found):
            show(f"{begun:6.2f} {'  ' * depth}{name}: {wall:.2f} s, CPU {cpu:.2f} s")


if __name__ == "__main__":
    main()
