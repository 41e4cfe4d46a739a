"""The run folder: made by process 0, and checked for access and space before anything compiles."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from meshwright.checkpoint import FOLDER, CheckpointReader
from meshwright.config.schema import CheckpointConfig
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main
from meshwright.step.canonical import CanonicalState
from meshwright.text.units import counted, human_bytes


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


def check_disk_space(folder: Path, structs: CanonicalState, config: CheckpointConfig) -> list[str]:
    """Refuse a disk without room for a checkpoint; warn if it has none for all that are kept.

    Args:
        folder: the run folder, which exists.
        structs: the shapes and types of the arrays of a checkpoint.
        config: whether checkpoints are saved, and how many are kept.

    Returns:
        the warnings.
    """
    if not config.enabled:
        return []
    needed = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(structs))
    # Process 0 decides for all processes, so that they continue or end together.
    free = int(broadcast(shutil.disk_usage(folder).free if is_main() else 0))
    if free < needed:
        raise UserError(
            f"there is no room for a checkpoint in {folder}",
            why=f"it takes {human_bytes(needed)}, and {human_bytes(free)} are free",
            fix=f"free disk space, write {Setting('hydra.run.dir', ANY)} with a folder on another "
            f"disk, or {Setting('checkpoint.enabled', False)}",
        )
    # One more than are kept, while it is being written.
    most = config.keep_last + config.keep_best + 1
    more = max(most - len(CheckpointReader(folder / FOLDER).updates()), 1)
    if free >= more * needed:
        return []
    return [
        f"the disk may get full: up to {counted(more, 'more checkpoint')} of {human_bytes(needed)} "
        f"will be in {folder}, where {human_bytes(free)} are free; "
        f"{Setting('checkpoint.keep_last', 1)} keeps fewer"
    ]
