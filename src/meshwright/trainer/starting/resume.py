"""Resuming from a checkpoint: finding it, checking that it fits the run, restoring it."""

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint import FOLDER, CheckpointMetadata, CheckpointReader, find_store
from meshwright.checkpoint.damage import (
    Damage,
    DamagedCheckpoint,
    all_damaged,
    checkpoints_gone,
    list_set_aside,
    saved_before,
    set_aside,
)
from meshwright.checkpoint.reader import read_run_id
from meshwright.data.contents import DataFingerprint
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main
from meshwright.program.trace.adapters import Adapter
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.text.json_text import flatten
from meshwright.text.masking import mask_tree
from meshwright.tracking.run_files import read_metrics
from meshwright.trainer.run_dir import refuse_locked
from meshwright.trainer.trained.base_weights import find_base

FIXED = (
    "model", "task", "data", "optimizer", "precision", "grpo", "generation",
    "run.seed", "training.mixed_precision", "training.ema_decay",
)  # fmt: skip
"""Sections of a config that affect results on any mesh; a resumed run must keep them."""

CHANGEABLE = (
    "model.mesh_shape", "data.workers", "data.prefetch", "data.cache_dir",
    "grpo.reward_seconds", "grpo.reward_processes", "generation.generation_batch_size",
)  # fmt: skip
"""Keys in them that cost time only, which a resumed run may change."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of arrays by group and canonical path."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and newer ones that cannot be read.

    In the ``same_run``, that is in the run's own folder, the run continues there.
    """

    folder: Path
    step: int
    metadata: CheckpointMetadata
    same_run: bool
    damaged: tuple[Damage, ...] = ()

    @property
    def path(self) -> Path:
        """The folder of this checkpoint."""
        return self.folder / str(self.step)


def find_resume_point(resume: str, run_dir: Path | None) -> ResumePoint | None:
    """Return the checkpoint that ``resume`` refers to; None to start over.

    In the run's own folder it is the newest whose metadata can be read.
    """
    if run_dir is not None:
        refuse_locked(run_dir)
        if resume not in ("auto", "must") and _is_restarted(run_dir):
            resume = "auto"
    if resume == "never":
        _refuse_mixing(run_dir)
        return None
    same_run = resume in ("auto", "must")
    where = run_dir if same_run else Path(resume)
    # Opening checkpoints initializes the devices, which all processes must do together.
    jax.devices()
    newest = broadcast(_find_newest(where, same_run=same_run) if is_main() else None)
    if "error" in newest:
        raise UserError(newest["error"], why=newest["why"], fix=newest["fix"])
    if not newest:
        if resume == "must":
            raise UserError(
                f"{Setting('resume', 'must')}, and there is no checkpoint to resume from",
                why=f"looked in {where}",
                fix=f"write {Setting('hydra.run.dir', ANY)} with the folder of the run, or "
                f"{Setting('resume', 'auto')}",
            )
        return None
    metadata = CheckpointMetadata(**newest["metadata"])
    damaged = tuple(Damage(*each) for each in newest["damaged"])
    return ResumePoint(Path(newest["folder"]), newest["step"], metadata, same_run, damaged)


def _is_restarted(run_dir: Path) -> bool:
    """Whether the launcher has started this run again, and it has saved something before."""
    earlier, folder = EarlierAttempts.from_environment().folder, run_dir.absolute() / FOLDER
    own = is_main() and earlier == run_dir.absolute() and folder.is_dir()
    return bool(broadcast(own and any(path.name.isdecimal() for path in folder.iterdir())))


def restore(
    point: ResumePoint, form: CanonicalForm, weights: str | Path | None = None
) -> TrainState:
    """Restore a checkpoint onto the devices; raise `DamagedCheckpoint` if it is damaged.

    ``weights`` is where those that the run does not train are now, if they have moved.
    """
    base = find_base(point.folder) if form.base else None
    arrays = CheckpointReader(point.folder).restore(point.step, form.structs)
    return form.state(arrays, None if base is None else base.place(form.base_structs, weights))


def set_damaged_aside(folder: Path, damage: Damage) -> str:
    """Rename a damaged checkpoint, so that it is never used again; return a warning."""
    renamed = broadcast(str(set_aside(folder, damage.step)) if is_main() else "")
    return (
        f"the checkpoint {folder / str(damage.step)} is damaged ({damage.problem}); it was "
        f"renamed to {Path(renamed).name}, and the run resumes from an earlier one"
    )


def run_id(run_dir: Path, point: ResumePoint | None) -> str:
    """Return which run this is: that of its folder or its checkpoint, or a new one."""
    saved = point.metadata.run if point is not None and point.same_run else None
    known = "" if saved is None else read_run_id(run_dir) or saved
    return broadcast(known or uuid.uuid4().hex)


def check_newest(point: ResumePoint | None, run_dir: Path) -> None:
    """Raise if another run has saved to the folder since the resume point was found."""
    if point is not None and not point.same_run:
        return
    known = [] if point is None else [point.step, *(damage.step for damage in point.damaged)]
    newest = broadcast(CheckpointReader(run_dir / FOLDER).latest() if is_main() else None)
    if newest != max(known, default=None):
        raise UserError(
            f"another run has saved checkpoints in {run_dir}",
            why=f"the newest is now step {newest}",
            fix="start this run again",
        )


def earlier_evaluations(
    point: ResumePoint, run_dir: Path | None
) -> list[tuple[int, dict[str, float]]]:
    """Return the evaluations of this run up to a checkpoint, oldest first."""
    if not point.same_run or run_dir is None:
        return []
    rows = read_metrics(run_dir / "metrics.jsonl") if is_main() else {}
    evaluations = [
        (step, {k: math.nan if v is None else v for k, v in values.items()})
        for (split, step), values in rows.items()
        if split == "eval" and step <= point.step
    ]
    return broadcast(evaluations)


def check_fits(point: ResumePoint, form: CanonicalForm) -> None:
    """Raise if the arrays of a checkpoint are not those of the run, and name the first of them."""
    saved = CheckpointReader(point.folder).shapes(point.step)
    if found := first_difference(saved, shapes_of(form)):
        group, path, have, need = found
        name = {"params": "parameter", "optimizer": "optimizer state"}.get(group, "state")
        raise UserError(
            f"the checkpoint {point.path} does not fit the "
            f"{'optimizer' if group == 'optimizer' else 'model'}",
            why=f"{name} `{path}` is {have} in the checkpoint and {need} in the run",
            fix="use the model and the optimizer it was trained with, or another folder "
            f"({Setting('hydra.run.dir', ANY)})",
        )


def shapes_of(form: CanonicalForm) -> Shapes:
    """Return the shapes of a state's arrays."""
    return {
        group: {path: tuple(struct.shape) for path, struct in own.items()}
        for group, own in form.structs.items()
    }


def first_difference(have: Shapes, need: Shapes) -> tuple[str, str, str, str] | None:
    """Return the group and the path of the first array that differs, and both shapes in words."""
    for group in ("params", "state", "optimizer"):
        own, other = have.get(group, {}), need.get(group, {})
        for path in dict.fromkeys([*other, *own]):
            if own.get(path) != other.get(path):
                was, now = (str(list(s[path])) if path in s else "missing" for s in (own, other))
                return group, path, was, now
    return None


def check_same_scale(point: ResumePoint, adapters: Iterable[Adapter]) -> None:
    """Raise if adapters are multiplied by something else than those of a checkpoint were."""
    for was, now in zip(getattr(find_base(point.folder), "adapters", ()), adapters, strict=False):
        if not math.isclose(was.scale, now.scale, rel_tol=1e-6):
            old, new = (round(each.scale * each.rank, 6) for each in (was, now))
            raise UserError(
                f"lora.alpha was {old:g} in the checkpoint {point.path} and is {new:g}",
                why="adapters are multiplied by alpha / rank, and a run folder remembers one alpha",
                fix=f"write {Setting('lora.alpha', old)}, or start a new run in another folder",
            )


def check_same_run(
    metadata: CheckpointMetadata,
    config: Mapping[str, Any],
    *,
    data: DataFingerprint,
    num_samples: int | None = None,
    global_batch_size: int,
    accept: bool,
    others: Sequence[str] = (),
) -> list[str]:
    """Return how a run differs from that of its checkpoint; raise unless that is accepted."""
    changes = [*config_changes(metadata.config, config), *others]
    if metadata.global_batch_size != global_batch_size:
        changes.append(
            f"the global batch was {metadata.global_batch_size} samples and is {global_batch_size}"
        )
    if metadata.dataset and data.text and metadata.dataset != data.text:
        changes.append(
            f"the data's fingerprint was {metadata.dataset} and is {data.text} "
            f"(compared: {data.compared})"
        )
        if metadata.num_samples and num_samples and metadata.num_samples != num_samples:
            changes[-1] += f": it had {metadata.num_samples} samples and has {num_samples}"
    if changes and not accept:
        raise UserError(
            f"the {'config' if config else 'run'} differs from that of the checkpoint "
            f"(step {metadata.step})",
            why="; ".join(changes),
            fix=f"restore the old values, start a new run in another {Setting('hydra.run.dir')}, "
            f"or continue anyway with {Setting('checkpoint.accept_changes', True)}",
        )
    return changes


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the values that affect results and have changed."""
    if not before or not now:
        return []
    # A checkpoint has no secrets.
    old, new = dict(flatten(before)), dict(flatten(mask_tree(now)))
    return [
        f"{key} was {_text(old, key)} and is {_text(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if _is_fixed(key) and old.get(key) != new.get(key)
    ]


def _refuse_mixing(run_dir: Path | None) -> None:
    """Raise if the folder already holds checkpoints of another run."""
    folder = None if run_dir is None else run_dir / FOLDER
    used = folder is not None and is_main() and folder.is_dir() and any(folder.iterdir())
    if broadcast(used):
        raise UserError(
            f"the folder {run_dir} holds the checkpoints of another run",
            why="a run that starts over would be mixed with it",
            fix=f"write {Setting('hydra.run.dir', ANY)} with a new folder, or remove this one "
            "first",
        )


def _is_fixed(key: str) -> bool:
    def inside(sections: tuple[str, ...]) -> bool:
        return any(key == section or key.startswith(f"{section}.") for section in sections)

    return inside(FIXED) and not inside(CHANGEABLE)


def _text(values: Mapping[str, Any], key: str) -> str:
    return "not set" if key not in values else "null" if values[key] is None else str(values[key])


def _find_newest(where: Path | None, *, same_run: bool) -> dict[str, Any]:
    """Look for the newest checkpoint, in the main process only; empty if there is none."""
    if where is None:
        return {}
    try:
        found: dict[str, Any] = {}
        if not same_run or (where / FOLDER).is_dir():
            folder, step = (where / FOLDER, None) if same_run else find_store(where)
            reader = CheckpointReader(folder)
            candidates = reader.steps() if step is None else [step]
            # What was asked for by name is not replaced by another one.
            chosen = candidates if same_run else candidates[-1:]
            found = _newest_sound(reader, chosen, same_run=same_run)
        if not found and (gone := saved_before(where)):
            raise checkpoints_gone(where, gone)
        return found
    except UserError as error:
        return {"error": error.what, "why": error.why, "fix": error.fix}


def _newest_sound(
    reader: CheckpointReader, steps: Sequence[int], *, same_run: bool
) -> dict[str, Any]:
    """Return the newest checkpoint whose metadata can be read, and the damaged ones after it."""
    damaged: list[Damage] = []
    for step in reversed(steps):
        try:
            reader.shapes(step)
            metadata = reader.metadata(step)
        except DamagedCheckpoint as error:
            if not same_run:
                raise
            damaged.append(error.damage)
            continue
        return {
            "folder": str(reader.folder),
            "step": step,
            "metadata": vars(metadata),
            "damaged": [[d.step, d.problem] for d in damaged],
        }
    if damaged or list_set_aside(reader.folder):
        fix = f"write {Setting('hydra.run.dir', ANY)} with a new folder to start over"
        raise all_damaged(reader.folder, damaged, fix)
    return {}
