"""Finding run folders: the given ones, and those inside a given folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import UserError

RUN_FILES = ("run.json", "metrics.jsonl")
"""A folder that contains one of these files is a run folder."""
MAX_DEPTH = 5
"""Levels below a folder that are searched; runs of a sweep are five levels below multirun."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders at these paths, each once.

    A path that is not a run folder stands for the runs inside it, newest first.
    """
    found: dict[Path, None] = {}
    for path in paths:
        found |= dict.fromkeys([path] if is_run(path) else _runs_inside(path))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return any((folder / name).is_file() for name in RUN_FILES)


def _runs_inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}",
            fix="give a run folder, such as outputs/<project>/<date>/<time>",
        )
    runs = sorted(_walk(folder, MAX_DEPTH), key=_newest, reverse=True)
    if not runs:
        raise UserError(
            f"{folder} is not a run folder, and contains none",
            why=f"there is no {' or '.join(RUN_FILES)} in it or in the folders inside it",
            fix="give a run folder, such as outputs/<project>/<date>/<time>",
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
