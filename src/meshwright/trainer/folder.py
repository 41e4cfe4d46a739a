"""The folder of a run: made by process 0, known to all, and writable before anything compiles."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main


def make_folder(folder: Path, files: Mapping[str, str] | None = None) -> Path:
    """Make the folder process 0 chose, put these files into it, and return its path everywhere."""
    said = {"folder": str(folder.absolute()), "problem": ""}
    if is_main():
        said["problem"] = _try(folder.absolute(), files or {})
    said = broadcast(said)
    if said["problem"]:
        raise UserError(
            f"cannot write the output directory {said['folder']}",
            why=said["problem"],
            fix=f"write {Setting('hydra.run.dir', ANY)} with a directory you can write to",
        )
    return Path(said["folder"])


def _try(folder: Path, files: Mapping[str, str]) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A folder that exists may still refuse.
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        return str(error)
    return ""
