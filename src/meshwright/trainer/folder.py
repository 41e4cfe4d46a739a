"""The run folder: made by process 0, and checked to be writable before anything compiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main


def make_run_folder(folder: Path) -> None:
    """Make the folder on process 0, and check that it can be written to."""

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # An existing folder need not be writable.
        with tempfile.TemporaryFile(dir=folder):
            pass

    _on_main(folder, make)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into the folder on process 0, by name; no files, no folder."""
    if not files:
        return

    def write() -> None:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    _on_main(folder, write)


def _on_main(folder: Path, act: Callable[[], None]) -> None:
    """Act on process 0; raise the same error on all processes if that fails."""
    problem = ""
    if is_main():
        try:
            act()
        except OSError as error:
            problem = str(error)
    problem = broadcast(problem)
    if problem:
        raise UserError(
            f"cannot write the output directory {folder.absolute()}",
            why=problem,
            fix=f"write {Setting('hydra.run.dir', ANY)} with a directory you can write to",
        )
