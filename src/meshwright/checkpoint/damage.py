"""What is wrong with checkpoints: damaged ones, which are set aside, and paths without any."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import Setting, UserError, did_you_mean, first_line
from meshwright.tracking.run_files import read_lines

SUFFIX = ".damaged"
_NOT_DAMAGE = ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Errors of a file system or a device; another attempt may succeed."""
_LONGEST_REASON = 400


@dataclass(frozen=True)
class Damage:
    """What is wrong with the checkpoint of a step: the array or file, and how it shows."""

    step: int
    problem: str


class DamagedCheckpoint(UserError):
    """A checkpoint differs from what was saved, or cannot be read."""

    def __init__(self, folder: Path, damage: Damage) -> None:
        self.damage = damage
        super().__init__(
            f"the checkpoint {folder / str(damage.step)} is damaged",
            why=damage.problem,
            fix="use another one; in a shell, "
            f"`meshwright check {folder.parent}` says which are sound",
        )


def all_damaged(folder: Path, damaged: Sequence[Damage], fix: str) -> UserError:
    """Return the error for a checkpoint folder without a sound checkpoint."""
    names = [path.name for path in list_set_aside(folder)]
    return UserError(
        f"every checkpoint in {folder} is damaged",
        why="; ".join([*(f"{d.step}: {d.problem}" for d in damaged), *names]),
        fix=fix,
    )


def reading_error(folder: Path, step: int, error: Exception, what: str = "") -> UserError:
    """Return the error for an exception raised while ``what`` of a checkpoint was read."""
    if isinstance(error, UserError):
        return error
    problem = _unreadable(folder / str(step), str(error)) or ": ".join(
        filter(None, (what, first_line(error)[:_LONGEST_REASON]))
    )
    if isinstance(error, MemoryError | PermissionError) or any(
        code in str(error) for code in _NOT_DAMAGE
    ):
        return UserError(f"the checkpoint {folder / str(step)} cannot be read", why=problem)
    return DamagedCheckpoint(folder, Damage(step, problem))


def _unreadable(checkpoint: Path, text: str) -> str:
    """Return the file or array that an exception of TensorStore names last, and why; or nothing."""
    files = re.findall(rf'"{re.escape(str(checkpoint))}/([^"]*[^"/])"', text)
    arrays = re.findall(r'Error reading "([^"]+)/[^"/]*" in OCDBT', text)
    why = re.split(r" \[(?:tensorstore_spec|source)", text)[0].rpartition('": ')[2]
    if not why or not (named := files or arrays):
        return ""
    return f"{named[-1]} cannot be read: {why.splitlines()[0][:_LONGEST_REASON]}"


def set_aside(folder: Path, step: int) -> Path:
    """Rename a checkpoint so that it is no longer listed; return its new path."""
    target = folder / f"{step}{SUFFIX}"
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{step}{SUFFIX}-{number}"
    return (folder / str(step)).rename(target)


def list_set_aside(folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside."""
    return sorted(folder.glob(f"[0-9]*{SUFFIX}*"))


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


def saved_before(run: Path) -> list[int]:
    """Return the steps that a run folder says were saved, whether or not they are there."""
    events = read_lines(run / "events.jsonl")
    return sorted({event["step"] for event in events if event.get("kind") == "checkpoint"})


def checkpoints_gone(run: Path, saved: Sequence[int]) -> UserError:
    """Return the error about a run folder whose checkpoints are not there any more."""
    steps = ", ".join(map(str, saved[-3:]))
    return UserError(
        f"the checkpoints of the run in {run} are gone",
        why=f"it has saved step {'…, ' if len(saved) > 3 else ''}{steps}, and none is there",
        fix=f"put its checkpoints folder back, or start over with {Setting('resume', 'never')} or "
        f"another {Setting('hydra.run.dir')}",
    )


def no_checkpoint(path: Path, folder: Path) -> UserError:
    """Return the error about a path whose checkpoint folder has no checkpoints."""
    what = f"there is no checkpoint in {path}"
    if gone := saved_before(path):
        return checkpoints_gone(path, gone)
    if (path / _RUN_FILE).is_file():
        return UserError(
            what,
            why="the run has not saved one yet",
            fix="wait for its first checkpoint, or continue the run until it ends: the last step "
            "is always saved unless checkpoint.enabled=false",
        )
    if (path / "config.json").is_file():
        return UserError(
            what,
            why="it is a folder of weights, not of a run",
            fix=f"train from it with model=hf model.weights={path}, or read it with "
            f'mw.load_model("{path}")',
        )
    return UserError(what, why=f"{folder} has no subfolder named after a step", fix=_NAME_ONE)
