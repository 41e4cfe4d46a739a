"""The checkpoint folder of a run: Orbax writes it in the background and deletes old ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from meshwright.checkpoint.metadata import FORMAT, CheckpointMetadata
from meshwright.errors import ANY, Setting, UserError, first_line
from meshwright.processes import broadcast, is_main, process_count, process_index

FOLDER = "checkpoints"
STATE, METADATA = "state", "passport"
"""Names of a checkpoint's two parts on disk."""


@dataclass(frozen=True)
class Saved:
    """The outcome of a save.

    Attributes:
        update: the update that was saved.
        seconds: time from the call until everything was on disk.
        error: the exception of a failed save.
    """

    update: int
    seconds: float
    error: Exception | None = None


class CheckpointStore:
    """The checkpoints in one folder; every process must make the same calls.

    Args:
        folder: the folder, with one subfolder per checkpoint, named after its update.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the lowest loss to keep in addition.
        read_only: never write or delete anything.
        alone: only this process makes the calls.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        read_only: bool = False,
        alone: bool = False,
    ) -> None:
        # Orbax logs every file it writes.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder.absolute()
        if not read_only:
            _make_folder(self.folder)
        # With named processes Orbax synchronizes through the coordinator. By default it runs a
        # device program, which a background thread must not start while the step runs.
        members = {process_index()} if alone else set(range(process_count()))
        together = ocp.options.MultiprocessingOptions(
            primary_host=process_index() if alone else 0, active_processes=members
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(STATE, METADATA),
            item_handlers={
                STATE: ocp.StandardCheckpointHandler(multiprocessing_options=together),
                METADATA: ocp.JsonCheckpointHandler(multiprocessing_options=together),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_policy(keep_last, keep_best),
                best_fn=_loss,
                best_mode="min",
                create=False,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
                multiprocessing_options=together,
            ),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None

    def updates(self) -> list[int]:
        """Return the updates that have a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Return the update of the newest checkpoint on process 0; None without checkpoints."""
        updates = self.updates()
        return broadcast(updates[-1] if updates else None)

    def best(self) -> int | None:
        """Return the update of the checkpoint with the lowest loss; None if none has a loss."""
        return self._manager.best_step()

    def save(
        self, state: Any, metadata: CheckpointMetadata, *, loss: float | None = None
    ) -> Saved | None:
        """Write a checkpoint in the background.

        Waits for the previous save first, and returns its outcome.

        Args:
            state: arrays in canonical form, which nothing else may donate.
            metadata: what to record beside them.
            loss: ranks checkpoints for ``keep_best``; None if it is not known.
        """
        previous = self.wait()
        self._pending = self._thread.submit(self._save, state, metadata, loss)
        return previous

    def wait(self) -> Saved | None:
        """Wait for the save in progress, if any, and return its outcome."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def finished(self) -> Saved | None:
        """Return the outcome of the last save if it is complete, without waiting."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def metadata(self, update: int) -> CheckpointMetadata:
        """Read the metadata of a checkpoint."""
        args = ocp.args.Composite(**{METADATA: ocp.args.JsonRestore()})
        values = self._read(update, lambda: self._manager.restore(update, args=args))[METADATA]
        if values.get("format", 0) > FORMAT:
            raise UserError(
                f"the checkpoint {self.folder / str(update)} was written by a newer version",
                why=f"its format is {values['format']}; this version reads formats up to {FORMAT}",
                fix="install a newer meshwright",
            )
        return CheckpointMetadata(**values)

    def shapes(self, update: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Read the shape of every array of a checkpoint, by group and path."""
        arrays: Any = self._read(update, lambda: self._manager.item_metadata(update))[STATE]
        tree = getattr(arrays, "tree", arrays)
        return {
            group: {path: tuple(array.shape) for path, array in by_path.items()}
            for group, by_path in tree.items()
        }

    def restore(self, update: int, structs: Any) -> Any:
        """Restore the arrays of a checkpoint with the shardings of ``structs``."""
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(structs)})
        return self._read(update, lambda: self._manager.restore(update, args=args))[STATE]

    def close(self) -> Saved | None:
        """Wait for the save in progress and release resources; safe to call again."""
        last = self.wait()
        self._thread.shutdown()
        self._manager.close()
        return last

    def _save(self, state: Any, metadata: CheckpointMetadata, loss: float | None) -> Saved:
        started = time.perf_counter()
        error: Exception | None = None
        try:
            jax.block_until_ready(state)
            self._manager.save(
                metadata.update,
                args=ocp.args.Composite(
                    **{
                        STATE: ocp.args.StandardSave(state),
                        METADATA: ocp.args.JsonSave(asdict(metadata)),
                    }
                ),
                metrics=None if loss is None else {"loss": loss},
                force=True,
            )
            self._manager.wait_until_finished()
        except Exception as caught:
            # Training continues whatever went wrong; the caller reports it.
            error = caught
        return Saved(metadata.update, time.perf_counter() - started, error)

    def _read(self, update: int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the checkpoint {self.folder / str(update)} cannot be read",
                why=first_line(error),
                fix="name another one with resume=PATH, or start over with resume=never",
            ) from error


def find_store(path: Path) -> tuple[Path, int | None]:
    """Return the checkpoint folder a path refers to, and the update if it names one.

    The path is a run folder, its checkpoint folder, or a single checkpoint.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", fix="name a run folder or a checkpoint")
    if path.parent.name == FOLDER and path.name.isdecimal():
        return path.parent, int(path.name)
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not any(child.name.isdecimal() for child in folder.iterdir() if child.is_dir()):
        raise UserError(
            f"there is no checkpoint in {path}",
            why=f"{folder} has no subfolder named after an update",
            fix="name a run folder, its checkpoint folder, or a single checkpoint",
        )
    return folder, None


def _make_folder(folder: Path) -> None:
    """Make the folder on process 0; raise the same error on all processes."""
    problem = ""
    if is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = str(error)
    problem = broadcast(problem)
    if problem:
        raise UserError(
            f"cannot write checkpoints to {folder}",
            why=problem,
            fix=f"write {Setting('hydra.run.dir', ANY)} with a folder you can write to, or "
            f"{Setting('checkpoint.enabled', False)}",
        )


def _policy(keep_last: int, keep_best: int) -> policies.PreservationPolicy:
    best = policies.BestN(
        get_metric_fn=lambda metrics: -_loss(metrics),
        n=keep_best,
        keep_checkpoints_without_metrics=False,
    )
    return policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])


def _loss(metrics: Any) -> float:
    return float(metrics["loss"])
