"""The run folder: made by process 0, and checked to be writable before anything compiles."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main


@contextmanager
def claimed_folder(folder: Path) -> Generator[Path]:
    """Yield a new folder for this run: the one given, or if it exists one with a number.

    Runs that start in the same second are given the same name. What is still empty after the
    block is removed again.
    """
    made: list[Path] = []
    claimed = ""
    if is_main():
        # Whoever cannot write here gets a clear error once the folder is needed.
        with suppress(OSError):
            claimed = str(_claim(folder, made))
    try:
        yield Path(broadcast(claimed or str(folder)))
    finally:
        with suppress(OSError):
            for path in reversed(made):
                path.rmdir()


def _claim(folder: Path, made: list[Path]) -> Path:
    """Make a new folder and return it; note all folders that were made, the outermost first."""
    for parent in reversed(folder.parents):
        with suppress(FileExistsError):
            parent.mkdir()
            made.append(parent)
    for number in itertools.count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            made.append(path)
            return path
    raise AssertionError("there is always another number")


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
