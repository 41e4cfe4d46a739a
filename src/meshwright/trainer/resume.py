"""Going on from a checkpoint: which one, whether it fits, and what it asks to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.store import FOLDER, CheckpointStore, Passport, find_store
from meshwright.config.origins import flatten
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState

FIXED = ("model", "task", "data", "optimizer", "precision", "run.seed", "training.mixed_precision")
"""What of a config decides the course of a run, whatever the mesh; resuming keeps it."""

_FREE = ("model.mesh_shape", "data.workers", "data.prefetch")


@dataclass(frozen=True)
class Origin:
    """A checkpoint to go on from.

    Attributes:
        folder: the folder of checkpoints.
        update: which one.
        passport: what it says of itself.
        own: whether it is the run's own, so that the run goes on in the same folder.
    """

    folder: Path
    update: int
    passport: Passport
    own: bool


def find_origin(resume: str, run_dir: Path | None) -> Origin | None:
    """Return the checkpoint ``resume`` means; None to start anew.

    Args:
        resume: auto, must, never, or the path of a run or a checkpoint.
        run_dir: the run's own folder; None if it has none.
    """
    if resume == "never":
        _refuse_mixing(run_dir)
        return None
    own = resume in ("auto", "must")
    where = run_dir if own else Path(resume)
    # Who opens checkpoints asks for devices, which several processes can only make together.
    jax.devices()
    found = broadcast(_look(where, own=own) if is_main() else None)
    if "error" in found:
        raise UserError(found["error"], why=found["why"], fix=found["fix"])
    if not found:
        if resume == "must":
            raise UserError(
                f"{Setting('resume', 'must')}, and there is no checkpoint to resume from",
                why=f"looked in {where}",
                fix=f"write {Setting('hydra.run.dir', ANY)} with the folder of the run, or "
                f"{Setting('resume', 'auto')}",
            )
        return None
    folder = Path(found["folder"])
    return Origin(folder, found["update"], Passport(**found["passport"]), own)


def restore(origin: Origin, form: CanonicalForm) -> TrainState:
    """Read a checkpoint to the devices."""
    store = CheckpointStore(origin.folder, read_only=True)
    try:
        return form.state(store.restore(origin.update, form.structs))
    finally:
        store.close()


def check_fits(origin: Origin, form: CanonicalForm) -> None:
    """Refuse a checkpoint whose arrays are not those of the run."""
    store = CheckpointStore(origin.folder, read_only=True)
    try:
        _check_shapes(store.shapes(origin.update), form.structs, origin)
    finally:
        store.close()


def check_same_run(
    passport: Passport,
    config: Mapping[str, Any],
    *,
    dataset: str,
    global_batch_size: int,
    accept: bool,
) -> list[str]:
    """Return in what a run differs from its checkpoint's, if that is accepted; else refuse."""
    changes = config_changes(passport.config, config)
    if passport.global_batch_size != global_batch_size:
        changes.append(
            f"the global batch was {passport.global_batch_size} samples and is {global_batch_size}"
        )
    if passport.dataset and dataset and passport.dataset != dataset:
        changes.append(f"the data's fingerprint was {passport.dataset} and is {dataset}")
    if changes and not accept:
        raise UserError(
            f"the config differs from that of the checkpoint (update {passport.update})",
            why="; ".join(changes),
            fix=f"write it as it was; or start a new run in another {Setting('hydra.run.dir')}; or "
            f"write {Setting('checkpoint.accept_changes', True)} to continue anyway",
        )
    return changes


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which values that decide the course of a run have changed."""
    if not before or not now:
        return []
    old, new = dict(flatten(dict(before))), dict(flatten(dict(now)))
    return [
        f"{key} was {_text(old, key)} and is {_text(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if _is_fixed(key) and old.get(key) != new.get(key)
    ]


def _refuse_mixing(run_dir: Path | None) -> None:
    """Refuse to start anew where another run's checkpoints would be taken for this one's."""
    folder = None if run_dir is None else run_dir / FOLDER
    used = folder is not None and is_main() and folder.is_dir() and any(folder.iterdir())
    if broadcast(used):
        raise UserError(
            f"{Setting('resume', 'never')}, and the folder holds the checkpoints of another run",
            why=f"the two would be mixed in {run_dir}",
            fix=f"write {Setting('hydra.run.dir', ANY)} with a new folder, or remove this one "
            "first",
        )


def _is_fixed(key: str) -> bool:
    def inside(sections: tuple[str, ...]) -> bool:
        return any(key == section or key.startswith(f"{section}.") for section in sections)

    return inside(FIXED) and not inside(_FREE)


def _text(values: Mapping[str, Any], key: str) -> str:
    return "not there" if key not in values else "null" if values[key] is None else str(values[key])


def _look(where: Path | None, *, own: bool) -> dict[str, Any]:
    """Look for the newest checkpoint, in the main process alone."""
    if where is None or (own and not (where / FOLDER).is_dir()):
        return {}
    try:
        folder, update = (where / FOLDER, None) if own else find_store(where)
        store = CheckpointStore(folder, read_only=True, alone=True)
        try:
            updates = store.updates()
            if not updates:
                return {}
            update = updates[-1] if update is None else update
            passport = store.passport(update)
        finally:
            store.close()
    except UserError as error:
        return {"error": error.what, "why": error.why, "fix": error.fix}
    return {"folder": str(folder), "update": update, "passport": vars(passport)}


def _check_shapes(saved: Mapping[str, Any], wanted: Mapping[str, Any], origin: Origin) -> None:
    """Compare the arrays of a checkpoint with those of the run, and name what differs."""
    names = {"params": "parameter", "state": "state", "optimizer": "optimizer state"}
    for group, name in names.items():
        have = {path: tuple(shape) for path, shape in saved.get(group, {}).items()}
        need = {path: tuple(struct.shape) for path, struct in wanted[group].items()}
        for path in dict.fromkeys([*need, *have]):
            if have.get(path) != need.get(path):
                raise UserError(
                    f"the checkpoint {origin.folder / str(origin.update)} does not fit the "
                    f"{'optimizer' if group == 'optimizer' else 'model'}",
                    why=f"{name} `{path}` is {_shape(have, path)} in the checkpoint and "
                    f"{_shape(need, path)} in the run",
                    fix="use the model and the optimizer it was trained with, or another folder "
                    f"({Setting('hydra.run.dir', ANY)})",
                )


def _shape(shapes: Mapping[str, tuple[int, ...]], path: str) -> str:
    return str(list(shapes[path])) if path in shapes else "missing"
