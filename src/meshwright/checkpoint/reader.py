"""Reading checkpoints: metadata and arrays, compared with the checksums they were saved with."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from meshwright.checkpoint.checksum_item import CHECKSUMS, Checksums, read_checksums
from meshwright.checkpoint.checksums import ArraySum, json_checksum, merge_sums, sums_of
from meshwright.checkpoint.damage import (
    Damage,
    DamagedCheckpoint,
    list_set_aside,
    missing_folder,
    no_checkpoint,
    reading_error,
)
from meshwright.checkpoint.metadata import FORMAT, CheckpointMetadata, check_format
from meshwright.checkpoint.quiet import quiet_failures, silence_orbax
from meshwright.errors import UserError, typed_line
from meshwright.processes import gather, is_main, process_index

FOLDER = "checkpoints"
RUN_ID = "run.id"
"""The file of a run folder that says which run its checkpoints belong to."""
STATE, METADATA, METRICS = "state", "passport", "metrics"
"""Names of a checkpoint's parts on disk, beside the checksums."""

_ITEMS_FILE = "_CHECKPOINT_METADATA"
"""The file in which Orbax lists the parts."""


class CheckpointReader:
    """Reads the checkpoints in one folder, which are named after their steps, and never writes.

    What differs from what was saved raises `DamagedCheckpoint`, with the name of the array or file.
    """

    def __init__(self, folder: Path) -> None:
        silence_orbax()
        self.folder = folder.absolute()
        # Reading needs no other process: what each of them finds is compared afterwards.
        self._alone = ocp.options.MultiprocessingOptions(
            primary_host=process_index(), active_processes={process_index()}
        )

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        named = [path for path in self.folder.iterdir() if path.name.isdecimal()]
        return sorted(int(path.name) for path in named if path.is_dir())

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint; None without checkpoints."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step of the checkpoint with the lowest loss; None if none has a loss."""
        losses = {step: loss_of(self.folder / str(step)) for step in self.steps()}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        return min(known, key=lambda step: known[step], default=None)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a checkpoint."""

        def read() -> Any:
            return dict(json.loads((path / METADATA / "metadata").read_bytes()))

        path = self.folder / str(step)
        values = self._try(step, METADATA, read)
        # Other formats need not have checksums.
        if values.get("format") == FORMAT or (path / CHECKSUMS).is_dir():
            checksums = self.checksums(step)
            if checksums.metadata != json_checksum(values):
                raise self._damaged(step, f"{METADATA}/metadata differs from what was saved")
            if checksums.loss != loss_of(path):
                raise self._damaged(step, f"{METRICS}/metrics differs from what was saved")
        check_format(f"the checkpoint {path}", values.get("format"), FORMAT)
        metadata: CheckpointMetadata = self._try(
            step, METADATA, lambda: CheckpointMetadata(**values)
        )
        self._check_place(step, metadata)
        return metadata

    def _check_place(self, step: int, metadata: CheckpointMetadata) -> None:
        """Raise if a checkpoint lies under another number, or in the folder of another run."""
        if metadata.step != step:
            problem = f"it is the checkpoint of step {metadata.step} under another number: "
            raise self._damaged(step, problem + "the folder was renamed or copied")
        run = read_run_id(self.folder.parent)
        if metadata.run and run and metadata.run != run:
            problem = f"it is a checkpoint of another run: {metadata.run}, and this folder is that"
            raise self._damaged(step, f"{problem} of {run} ({RUN_ID})")

    def checksums(self, step: int) -> Checksums:
        """Read the checksums of a checkpoint."""
        path = self.folder / str(step)
        parts = path / _ITEMS_FILE
        self._try(step, _ITEMS_FILE, lambda: json.loads(parts.read_bytes())["item_handlers"])
        return self._try(step, CHECKSUMS, lambda: read_checksums(path / CHECKSUMS))

    def shapes(self, step: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Read the shape of every array of a checkpoint, by group and path.

        Everything but the arrays themselves is read and compared: whoever reads arrays, to check,
        to resume or to export, finds the same damage.
        """
        self.metadata(step)
        checksums = self.checksums(step)

        def read() -> dict[str, dict[str, tuple[int, ...]]]:
            # A checkpointer would return nothing, without saying why.
            handler: Any = ocp.StandardCheckpointHandler(multiprocessing_options=self._alone)
            arrays = handler.metadata(self.folder / str(step) / STATE)
            tree = getattr(arrays, "tree", arrays)
            _read_array_metadata(self.folder / str(step) / STATE)
            return {
                group: {path: tuple(array.shape) for path, array in by_path.items()}
                for group, by_path in tree.items()
            }

        shapes: dict[str, dict[str, tuple[int, ...]]] = self._try(step, STATE, read)
        found = {f"{group}/{path}" for group, by_path in shapes.items() for path in by_path}
        saved = set(checksums.arrays)
        for name in sorted(saved ^ found):
            what = "is missing" if name in saved else "was not saved"
            raise self._damaged(step, f"array `{name}` {what}")
        return shapes

    def restore(self, step: int, structs: Any) -> Any:
        """Restore the arrays of a checkpoint with the shardings of ``structs``, and check them.

        Every process must make the call; each reads and checks its own shards.
        """

        def read() -> tuple[Any, dict[str, Any]]:
            with self._checkpointer(ocp.StandardCheckpointHandler) as reader:
                place, wanted = self.folder / str(step) / STATE, ocp.args.StandardRestore(structs)
                arrays = reader.restore(place, args=wanted)
            sums = sums_of(arrays, main=is_main())
            return arrays, {name: own.to_json() for name, own in sums.items()}

        restored, error = self._attempt(step, STATE, read)
        arrays, sums = restored or (None, {})
        problem = None if error is None else [isinstance(error, DamagedCheckpoint), error.why]
        results = gather([problem, sums])
        # The error of a process, which need not be this one.
        for damaged, why in (found for found, _ in results if found is not None):
            if damaged:
                raise self._damaged(step, why)
            raise UserError(f"the checkpoint {self.folder / str(step)} cannot be read", why=why)
        parts = [{n: ArraySum.from_json(s) for n, s in own.items()} for _, own in results]
        self._compare(step, merge_sums(parts))
        return arrays

    def read(self, step: int, paths: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """Read some arrays of a checkpoint, by group and path, as NumPy arrays, and check them."""
        wanted = ocp.args.PyTreeRestore(
            item={group: dict.fromkeys(names, 0) for group, names in paths.items()},
            restore_args={
                group: {name: ocp.RestoreArgs(np.ndarray) for name in names}
                for group, names in paths.items()
            },
            partial_restore=True,
        )

        def read() -> Any:
            with self._checkpointer(ocp.PyTreeCheckpointHandler) as reader:
                return reader.restore(self.folder / str(step) / STATE, args=wanted)

        arrays: dict[str, dict[str, NDArray[Any]]] = self._try(step, STATE, read)
        self._compare(step, sums_of(arrays))
        return arrays

    def _checkpointer(self, handler: Callable[..., Any]) -> Any:
        return ocp.Checkpointer(
            handler(multiprocessing_options=self._alone), multiprocessing_options=self._alone
        )

    def _compare(self, step: int, arrays: dict[str, ArraySum]) -> None:
        if difference := self.checksums(step).difference(arrays):
            raise self._damaged(step, difference)

    def _try(self, step: int, what: str, read: Callable[[], Any]) -> Any:
        value, error = self._attempt(step, what, read)
        if error is not None:
            raise error
        return value

    def _attempt(
        self, step: int, what: str, read: Callable[[], Any]
    ) -> tuple[Any, UserError | None]:
        """Return what was read, or the error to raise."""
        with quiet_failures() as failures:
            try:
                return read(), None
            except Exception as error:
                failures.append(reading_error(self.folder, step, error, what))
        return None, failures[0]

    def _damaged(self, step: int, problem: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.folder, Damage(step, problem))


def find_store(path: Path) -> tuple[Path, int | None]:
    """Return the checkpoint folder a path refers to, and the step if it names one.

    The path is a run folder, its checkpoint folder, or a single checkpoint.
    """
    path = path.absolute()
    if not path.is_dir():
        raise missing_folder(path)
    if path.parent.name == FOLDER and path.name.isdecimal():
        return path.parent, int(path.name)
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not CheckpointReader(folder).steps() and not list_set_aside(folder):
        raise no_checkpoint(path, folder)
    return folder, None


def read_run_id(run_dir: Path) -> str:
    """Return which run a folder belongs to; empty if it does not say so."""
    try:
        return (run_dir / RUN_ID).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_array_metadata(state: Path) -> None:
    """Read what Orbax keeps for each array, which it reads to restore arrays but not always."""
    for file in sorted((state / "array_metadatas").glob("process_*")):
        try:
            for each in json.loads(file.read_bytes())["array_metadatas"]:
                own = each["array_metadata"]
                _ = own["param_name"], own["write_shape"], own["chunk_shape"], own["ext_metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"array_metadatas/{file.name}: {typed_line(error)}") from error


def loss_of(checkpoint: Path) -> float | None:
    """Return the loss that ranks a checkpoint; None if it has none that is finite."""
    try:
        loss = float(json.loads((checkpoint / METRICS / "metrics").read_bytes())["loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if math.isfinite(loss) else None


def has_readable_metrics(checkpoint: Path) -> bool:
    """Whether Orbax can read the loss of a checkpoint, or there is none."""
    file = checkpoint / METRICS / "metrics"
    try:
        return not file.parent.exists() or "loss" in json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):
        return False
