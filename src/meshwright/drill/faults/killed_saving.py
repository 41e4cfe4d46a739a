"""Processes that are killed while they write a checkpoint, at several points of a save."""

from __future__ import annotations

import os
import signal

from meshwright.drill.fault import Fault, Missed
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import SAME
from meshwright.drill.scene import Scene

_POINTS = (0.0, 0.4, 0.8)
"""When a process is killed in each attempt, as a share of the time that a save takes."""


def _inject(hooks: Hooks) -> None:
    number = hooks.attempt
    if number < len(_POINTS) and hooks.rank == number % hooks.nprocs:
        # A later save in every attempt, so that each of them completes a checkpoint.
        hooks.during_save(
            (number + 2) * hooks.told.every,
            _POINTS[number] * hooks.told.save_seconds,
            lambda: os.kill(os.getpid(), signal.SIGKILL),
        )


def _play(scene: Scene) -> str:
    launched = scene.train("--restarts=6", inject=True)
    launched.check_code(0)
    kills = len(launched.injected)
    if kills < 2:
        raise Missed(f"{kills} saves were interrupted")
    scene.check_same()
    return f"{kills} saves interrupted, every checkpoint that is listed is whole, {SAME}"


FAULTS = (
    Fault(
        "sigkill-save",
        "SIGKILL while a checkpoint is written, at several points",
        "the checkpoint before restores, a partial one is never listed, leftovers are swept",
        _play,
        inject=_inject,
        starts=4,
    ),
)
