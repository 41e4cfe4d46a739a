"""The Python stacks of launched processes, asked for with a signal when one of them is stuck."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.launch.watch import is_stopped
from meshwright.runtime.heartbeat import STACKS_SIGNAL, stacks_file

WAIT_SECONDS = 2.0
_FRAME = re.compile(r'^  File "(?:.*/)?([^/"]+)", line (\d+) in (.+)$', re.MULTILINE)
_SHOWN = 4
"""Frames of each process that are shown, the newest first."""


def dump_stacks(
    files: Mapping[int, Path], pids: Mapping[int, int], send: Callable[[int, int], None]
) -> dict[int, str]:
    """Ask processes for their stacks and return where each is, in a line.

    A process without a heartbeat file does not know the signal that ``send`` sends.
    """
    asked = [rank for rank in pids if files[rank].exists() and not is_stopped(pids[rank])]
    for rank in asked:
        send(rank, STACKS_SIGNAL)
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until and not all(_text(files[rank]) for rank in asked):
        time.sleep(0.05)
    # A dump takes an instant, and several writes.
    time.sleep(0.2)
    return {rank: _where(_text(files[rank])) for rank in asked}


def keep_stacks(files: Mapping[int, Path], target: Path) -> list[Path]:
    """Copy the dumps to a folder and return the files."""
    kept: list[Path] = []
    for rank, file in files.items():
        if not _text(file):
            continue
        with suppress(OSError):
            target.mkdir(parents=True, exist_ok=True)
            kept.append(Path(shutil.copyfile(stacks_file(file), target / f"process-{rank}.txt")))
    return kept


def _text(file: Path) -> str:
    try:
        return stacks_file(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _where(text: str) -> str:
    """Return the newest frames of the main thread, which is the last one of a dump."""
    frames = _FRAME.findall(text.rpartition("most recent call first")[2])
    shown = [f"{name}:{line} in {function}" for name, line, function in frames[:_SHOWN]]
    return " ← ".join(shown) or "no answer"
