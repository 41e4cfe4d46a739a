"""Processes that fail by themselves: one exception, and a crash at every start."""

from __future__ import annotations

import os
import re
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path

from meshwright.drill.fault import Fault, Missed
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import resumed
from meshwright.drill.scene import STOP_SECONDS, Scene

_TEXT = "an exception that a drill raises"
_CRASH_CODE = 9


def _raise(hooks: Hooks) -> None:
    # Code outside the package, as the user's is.
    file = Path(hooks.told.notes) / "raises.py"
    if hooks.is_last:
        file.write_text(f"def act():\n    raise RuntimeError({_TEXT!r})\n", encoding="utf-8")
        loader = SourceFileLoader(file.stem, str(file))
        module = module_from_spec(ModuleSpec(file.stem, loader, origin=str(file)))
        loader.exec_module(module)
        hooks.at_update(module.act)


def _crash(hooks: Hooks) -> None:
    hooks.note_injected()
    if hooks.is_last:
        os._exit(_CRASH_CODE)


def _play_exception(scene: Scene) -> str:
    launched = scene.train(inject=True)
    if launched.code == 0:
        raise Missed("exit code 0 after an exception")
    launched.stopped(STOP_SECONDS)
    if _TEXT not in launched.problem():
        raise Missed(f"the first error is {launched.problem()!r}")
    shown = [line for line in launched.lines if re.match(rf"\[\d+\] .*: {_TEXT}", line.text)]
    if len(shown) != 1:
        raise Missed(f"the exception is shown {len(shown)} times")
    end = launched.find(rf"^launch: process {scene.last} ended with exit code \d+ at update (\d+)")
    return resumed(
        scene, launched, f"exit code {launched.code}, shown once with its update, {end[1]}"
    )


def _play_crashes(scene: Scene) -> str:
    scene.prepare(checkpoints=2)
    launched = scene.train("--restarts=10", inject=True)
    launched.check_code(_CRASH_CODE)
    launched.find(r"3 restarts without a new checkpoint: the cause has to be fixed")
    return resumed(scene, launched, "given up after 3 restarts without a new checkpoint")


FAULTS = (
    Fault(
        "exception",
        "an exception in the last process only",
        "shown once and first, with the process and the update; the same command resumes",
        _play_exception,
        inject=_raise,
    ),
    Fault(
        "crash-loop",
        "the last process crashes at every start",
        "given up after 3 restarts without a new checkpoint",
        _play_crashes,
        inject=_crash,
    ),
)
