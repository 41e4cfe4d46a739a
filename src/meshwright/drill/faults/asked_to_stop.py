"""Signals that ask to stop: preemption of one process, and Ctrl-C once and twice."""

from __future__ import annotations

import os
import signal
import time

from meshwright.drill.fault import Fault
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import resumed
from meshwright.drill.scene import STOP_SECONDS, Scene
from meshwright.errors import ExitCode


def _preempt(hooks: Hooks) -> None:
    if hooks.is_last:
        hooks.at_update(lambda: os.kill(os.getpid(), signal.SIGTERM))


def _interrupt(hooks: Hooks) -> None:
    def act() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        # Until the launcher has passed it on, so that short updates do not end the run before.
        time.sleep(1)

    if hooks.is_last:
        hooks.at_update(act)


def _interrupt_twice(hooks: Hooks) -> None:
    def act() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGINT)
        # A process that does not come back to its loop cannot stop by itself.
        time.sleep(600)

    if hooks.is_last:
        hooks.at_update(act)


def _play_graceful(scene: Scene, name: str) -> str:
    launched = scene.train("--restarts=3", inject=True)
    launched.check_code(ExitCode.PREEMPTED)
    # The update, which may be one that all agreed on, and the save before the end.
    run = scene.undisturbed
    limit = STOP_SECONDS + 3 * run.update_seconds() + 5 * run.save_seconds()
    seconds = launched.stopped(limit)
    update = int(launched.find(rf"stop: {name} asked to stop \(update (\d+)\)")[1])
    return resumed(scene, launched, f"saved update {update} and exited with 75 in {seconds:.1f} s")


def _play_twice(scene: Scene) -> str:
    launched = scene.train("--restarts=3", inject=True)
    launched.check_code(128 + signal.SIGKILL, ExitCode.PREEMPTED)
    seconds = launched.stopped(STOP_SECONDS)
    return resumed(scene, launched, f"ended {seconds:.1f} s after the first Ctrl-C")


_SAVED = "all stop after the same update, save it and exit with 75; the same command resumes"
FAULTS = (
    Fault(
        "preempt",
        "SIGTERM to the last process",
        _SAVED,
        lambda scene: _play_graceful(scene, "SIGTERM"),
        inject=_preempt,
    ),
    Fault(
        "ctrl-c",
        "Ctrl-C",
        _SAVED,
        lambda scene: _play_graceful(scene, "SIGINT"),
        inject=_interrupt,
    ),
    Fault(
        "ctrl-c-twice",
        "Ctrl-C, and again half a second later",
        "ends at once; the same command resumes from the last checkpoint",
        _play_twice,
        inject=_interrupt_twice,
    ),
)
