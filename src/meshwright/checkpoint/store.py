"""The checkpoints of a run: written by Orbax in the background, kept by age and by merit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from meshwright.errors import UserError, first_line
from meshwright.processes import broadcast, is_main, process_count, process_index

FOLDER = "checkpoints"
STATE, PASSPORT = "state", "passport"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What a checkpoint says of itself beside its arrays.

    Attributes:
        update: updates done.
        seed: of initialization, dropout and data order.
        dataset: fingerprint of the data; empty if it has none.
        global_batch_size: samples per update, which a resumed run keeps.
        plan: the plan of the run that wrote it.
        config: the whole config of that run; empty for library users.
        versions: of the packages that wrote it.
        processes: how many processes wrote it.
        format: of checkpoints.
    """

    update: int
    seed: int
    dataset: str = ""
    global_batch_size: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    format: int = FORMAT


@dataclass(frozen=True)
class Saved:
    """How a save went.

    Attributes:
        update: what was saved.
        seconds: from the call to the last byte.
        error: what went wrong, if anything.
    """

    update: int
    seconds: float
    error: Exception | None = None


class CheckpointStore:
    """The checkpoints in one folder; every process makes the same calls.

    Args:
        folder: where they are, one folder per update.
        keep_last: how many of the newest are kept.
        keep_best: how many of those with the lowest loss are kept besides.
        read_only: nothing is written or removed.
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
        # Orbax tells about every file it writes.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder.absolute()
        if not read_only:
            _make_folder(self.folder)
        # Named processes meet at the coordinator. By default they would meet in a device
        # program, which another thread must not start beside the step.
        members = {process_index()} if alone else set(range(process_count()))
        together = ocp.options.MultiprocessingOptions(
            primary_host=process_index() if alone else 0, active_processes=members
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(STATE, PASSPORT),
            item_handlers={
                STATE: ocp.StandardCheckpointHandler(multiprocessing_options=together),
                PASSPORT: ocp.JsonCheckpointHandler(multiprocessing_options=together),
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
        """Return the updates there are checkpoints of, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Return the newest checkpoint's update, as process 0 sees it; None if there is none."""
        found = self.updates()
        return broadcast(found[-1] if found else None)

    def best(self) -> int | None:
        """Return the update of the checkpoint with the lowest loss, if any was saved with one."""
        return self._manager.best_step()

    def save(self, state: Any, passport: Passport, *, loss: float | None = None) -> Saved | None:
        """Write a checkpoint in the background; waits for the one before, and says how it went.

        Args:
            state: arrays in canonical form that nobody else will consume.
            passport: what goes with them.
            loss: by which the best checkpoints are kept; None if it is not known.
        """
        before = self.wait()
        self._pending = self._thread.submit(self._save, state, passport, loss)
        return before

    def wait(self) -> Saved | None:
        """Wait until nothing is being written, and say how it went."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def finished(self) -> Saved | None:
        """Say how the last save went if it is done; does not wait."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def passport(self, update: int) -> Passport:
        """Read what a checkpoint says of itself."""
        args = ocp.args.Composite(**{PASSPORT: ocp.args.JsonRestore()})
        values = self._read(update, lambda: self._manager.restore(update, args=args))[PASSPORT]
        if values.get("format", 0) > FORMAT:
            raise UserError(
                f"the checkpoint {self.folder / str(update)} was written by a newer version",
                why=f"its format is {values['format']}, and this version reads up to {FORMAT}",
                fix="install a newer meshwright",
            )
        return Passport(**values)

    def shapes(self, update: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Read the shape of every array of a checkpoint, by group and path."""
        found: Any = self._read(update, lambda: self._manager.item_metadata(update))[STATE]
        tree = getattr(found, "tree", found)
        return {
            group: {path: tuple(array.shape) for path, array in arrays.items()}
            for group, arrays in tree.items()
        }

    def restore(self, update: int, structs: Any) -> Any:
        """Read a checkpoint's arrays to where ``structs`` say they live."""
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(structs)})
        return self._read(update, lambda: self._manager.restore(update, args=args))[STATE]

    def close(self) -> Saved | None:
        """Wait for what is being written, and let go; safe to call again."""
        last = self.wait()
        self._thread.shutdown()
        self._manager.close()
        return last

    def _save(self, state: Any, passport: Passport, loss: float | None) -> Saved:
        started = time.perf_counter()
        error: Exception | None = None
        try:
            jax.block_until_ready(state)
            self._manager.save(
                passport.update,
                args=ocp.args.Composite(
                    **{
                        STATE: ocp.args.StandardSave(state),
                        PASSPORT: ocp.args.JsonSave(asdict(passport)),
                    }
                ),
                metrics=None if loss is None else {"loss": loss},
                force=True,
            )
            self._manager.wait_until_finished()
        except Exception as caught:
            # Whatever it is, training goes on and is told.
            error = caught
        return Saved(passport.update, time.perf_counter() - started, error)

    def _read(self, update: int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the checkpoint {self.folder / str(update)} cannot be read",
                why=first_line(error),
                fix="resume=PATH names another one; resume=never starts anew",
            ) from error


def find_store(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints a path means, and the update if it names one.

    The path is a run's folder, its folder of checkpoints, or one checkpoint.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", fix="name a run's folder or a checkpoint")
    if path.parent.name == FOLDER and path.name.isdecimal():
        return path.parent, int(path.name)
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not any(child.name.isdecimal() for child in folder.iterdir() if child.is_dir()):
        raise UserError(
            f"there is no checkpoint in {path}",
            why=f"{folder} has no folder named after an update",
            fix="name a run's folder, its folder of checkpoints, or one checkpoint",
        )
    return folder, None


def _make_folder(folder: Path) -> None:
    """Make the folder, once for all processes."""
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
            fix="write hydra.run.dir=… with a folder you can write to, or checkpoint.enabled=false",
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
