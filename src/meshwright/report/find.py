"""Finding run folders: those named, and those inside a named folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import UserError

RUN_FILES = ("run.json", "metrics.jsonl")
"""A folder with one of these is a run's."""
MAX_DEPTH = 5
"""Levels below a named folder that are searched; a sweep's runs are five levels below multirun."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders that were named, each once.

    A folder of runs stands for those inside it, the newest first.
    """
    found: dict[Path, None] = {}
    for path in paths:
        found |= dict.fromkeys([path] if is_run(path) else _runs_inside(path))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any((folder / mark).is_file() for mark in RUN_FILES)


def _runs_inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}",
            fix="name a run's folder, such as outputs/<project>/<date>/<time>",
        )
    runs = sorted(_walk(folder, MAX_DEPTH), key=_newest, reverse=True)
    if not runs:
        raise UserError(
            f"{folder} is no run, and holds none",
            why=f"there is no {' or '.join(RUN_FILES)} in it or in the folders below",
            fix="name a run's folder, such as outputs/<project>/<date>/<time>",
        )
    return runs


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            inside = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inside:
            yield from _walk(path, depth - 1)


def _newest(run: Path) -> tuple[float, str]:
    return max((run / m).stat().st_mtime for m in RUN_FILES if (run / m).is_file()), str(run)
