"""Messages about paths at which there are no checkpoints: what is there, and what was meant."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import UserError, did_you_mean

_RUN_FILE = "run.json"
"""What a run writes before its first checkpoint."""

_NAME_ONE = "name a run folder, its checkpoint folder, or a single checkpoint"


def missing_folder(path: Path) -> UserError:
    """Return the error about a path that is not a folder, with the nearest name there is."""
    if path.exists():
        return UserError(f"there is no folder {path}", why="it is a file", fix=_NAME_ONE)
    parent, name = path.parent, path.name
    while not parent.is_dir():
        parent, name = parent.parent, parent.name
    folders = [each.name for each in parent.iterdir() if each.is_dir()]
    # Checkpoints are numbers, of which any two are alike.
    near = "" if name.isdecimal() else did_you_mean(name, folders)
    why = f"in {parent}: {near}" if near else f"there is no {name} in {parent}"
    return UserError(f"there is no folder {path}", why=why, fix=_NAME_ONE)


def no_checkpoint(path: Path, folder: Path) -> UserError:
    """Return the error about a folder without checkpoints.

    Args:
        path: the folder that was named.
        folder: where its checkpoints would be.
    """
    what = f"there is no checkpoint in {path}"
    if (path / _RUN_FILE).is_file():
        return UserError(
            what,
            why="the run has not saved one yet",
            fix="wait for its first checkpoint, or continue the run until it ends: the last update "
            "is always saved unless checkpoint.enabled=false",
        )
    if (path / "config.json").is_file():
        return UserError(
            what,
            why="it is a folder of weights, not of a run",
            fix=f"train from it with model=hf model.weights={path}, or read it with "
            f'mw.load_model("{path}")',
        )
    return UserError(what, why=f"{folder} has no subfolder named after an update", fix=_NAME_ONE)
