"""Processes that are killed: a worker, the one that coordinates, and the launcher."""

from __future__ import annotations

import os
import signal

from meshwright.drill.fault import Fault, several_processes
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import restarted, resumed
from meshwright.drill.scene import STOP_SECONDS, Scene

_CALL_DUMP = r"RPC: /|GRPC error|\*\*\* Check failure|:UNKNOWN:"


def _kill_last(hooks: Hooks) -> None:
    if hooks.is_last and hooks.attempt == 0:
        hooks.at_update(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _kill_first(hooks: Hooks) -> None:
    if hooks.rank == 0 and hooks.attempt == 0:
        hooks.at_update(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _kill_launcher(hooks: Hooks) -> None:
    if hooks.is_last:
        hooks.at_update(lambda: os.kill(os.getppid(), signal.SIGKILL))


def _pattern(rank: int) -> str:
    return rf"^error: process {rank} was killed by SIGKILL at update \d+; all processes are started"


def _play_last(scene: Scene) -> str:
    return restarted(scene, _pattern(scene.last))


def _play_first(scene: Scene) -> str:
    return restarted(scene, _pattern(0))


def _play_launcher(scene: Scene) -> str:
    launched = scene.train(inject=True)
    launched.check_code(128 + signal.SIGKILL)
    launched.stopped(STOP_SECONDS)
    launched.check_silent_about(_CALL_DUMP)
    return resumed(scene, launched, "no process left, the port is free")


_RESTARTED = "noticed in 10 s, all processes start again from the last checkpoint"
FAULTS = (
    Fault(
        "sigkill",
        "SIGKILL of the last process during an update",
        _RESTARTED,
        _play_last,
        inject=_kill_last,
    ),
    Fault(
        "sigkill-first",
        "SIGKILL of process 0, which coordinates",
        _RESTARTED,
        _play_first,
        inject=_kill_first,
        why_not=several_processes,
    ),
    Fault(
        "sigkill-launcher",
        "SIGKILL of the launcher",
        "its processes end with it, the port is free, the same command resumes",
        _play_launcher,
        inject=_kill_launcher,
    ),
)
