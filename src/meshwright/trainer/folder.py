"""The run folder: made by process 0, and checked to be writable before anything compiles."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main


def make_run_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Make the folder on process 0 and write these files into it, by name."""
    problem = broadcast(_try_to_make(folder.absolute(), files) if is_main() else "")
    if problem:
        raise UserError(
            f"cannot write the output directory {folder.absolute()}",
            why=problem,
            fix=f"write {Setting('hydra.run.dir', ANY)} with a directory you can write to",
        )


def _try_to_make(folder: Path, files: Mapping[str, str]) -> str:
    """Return what went wrong; empty if nothing did."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # An existing folder need not be writable.
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        return str(error)
    return ""
