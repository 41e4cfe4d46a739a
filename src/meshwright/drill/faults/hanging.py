"""Processes that hang: stopped by a signal, or holding Python's interpreter lock for ever."""

from __future__ import annotations

import ctypes
import os
import signal

from meshwright.drill.fault import Fault
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import restarted
from meshwright.drill.scene import STOP_SECONDS, Scene
from meshwright.launch.watch import UPDATES

_HANG_SECONDS = 3.0


def _stop(hooks: Hooks) -> None:
    if hooks.is_last and hooks.attempt == 0:
        hooks.at_update(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def _hold(hooks: Hooks) -> None:
    if hooks.is_last and hooks.attempt == 0:
        # Functions of a PyDLL keep the lock, so no other thread of the process runs.
        hooks.at_update(lambda: ctypes.PyDLL(None).sleep(86_400))


def _play_stopped(scene: Scene) -> str:
    rank = scene.last
    return restarted(
        scene, rf"^error: process {rank} hangs at update \d+: stopped by a signal \(SIGSTOP\)"
    )


def _play_held(scene: Scene) -> str:
    usual = max(_HANG_SECONDS, UPDATES * scene.undisturbed.update_seconds())
    return restarted(
        scene,
        rf"^error: process {scene.last} hangs at update \d+: no progress for",
        f"--hang-timeout={_HANG_SECONDS:g}",
        # The usual time of an update varies, and nobody waits for the exact limit.
        within=2 * usual + STOP_SECONDS,
    )


FAULTS = (
    Fault(
        "sigstop",
        "SIGSTOP of the last process, so that the others wait for it",
        "named in 10 s with where every process is, and all start again",
        _play_stopped,
        inject=_stop,
    ),
    Fault(
        "gil",
        "the last process holds Python's interpreter lock for ever",
        "noticed from outside, named with where every process is, and all start again",
        _play_held,
        inject=_hold,
    ),
)
