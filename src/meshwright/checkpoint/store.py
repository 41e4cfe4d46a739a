"""The checkpoint folder of a run: Orbax writes it in the background and deletes old ones."""

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from meshwright.checkpoint.checksum_item import (
    CHECKSUMS,
    ChecksumHandler,
    ChecksumSave,
    read_checksums,
)
from meshwright.checkpoint.damage import set_aside
from meshwright.checkpoint.metadata import CheckpointMetadata
from meshwright.checkpoint.quiet import quiet_failures, silence_orbax
from meshwright.checkpoint.reader import METADATA, STATE, CheckpointReader, has_readable_metrics
from meshwright.errors import ANY, Setting, UserError, first_line
from meshwright.processes import attempt_on_main, broadcast, is_main, process_count, process_index
from meshwright.text.units import human_bytes

logger = logging.getLogger("meshwright.checkpoint")

DELETED = "deleted"
"""Where an old checkpoint is moved to be deleted: a kill would leave a part of it listed."""
SLICED_BYTES = 1 << 20
"""Replicas write a part of an array each if it has so many bytes: a part compiles a program.

In a single process they would only copy to the host once more what the checksums read whole.
"""
FILE_BYTES = 1 << 26
"""Files of this size are written side by side by all cores; otherwise one file takes everything."""
IN_FLIGHT_BYTES = 1 << 28
"""Of a save that is waited for, what is copied to the host at once: in page-locked memory first."""
_LEAST_SLICE = "_min_slice_bytes_for_replica_parallel"


class StateNotFinite(Exception):
    """A state was not saved because it is not finite."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"the state after step {step} is not finite")


@dataclass(frozen=True)
class Saved:
    """The outcome of a save, which took ``seconds`` until everything was on disk.

    If it failed: the error, why in one line with the numbers, and what to do about it.
    """

    step: int
    seconds: float
    error: Exception | None = None
    reason: str = ""
    fix: str = ""


class CheckpointStore:
    """Writes the checkpoints of one folder; every process must make the same calls.

    The newest are kept and, in addition, those with the lowest loss.
    """

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        silence_orbax()
        least = SLICED_BYTES if process_count() > 1 else sys.maxsize
        vars(ocp.type_handlers.get_type_handler(jax.Array))[_LEAST_SLICE] = least
        self.folder = folder.absolute()
        _make_folder(self.folder)
        _set_aside_unreadable(self.folder)
        _remove_deleted(self.folder)
        # With named processes Orbax synchronizes through the coordinator. By default it runs a
        # device program, which a background thread must not start while the step runs.
        together = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(process_count()))
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(STATE, METADATA, CHECKSUMS),
            item_handlers={
                # The arrays were brought to the host. On GPUs, Orbax would copy them once more, all
                # of them to page-locked memory. Compressing takes longer than writing, for a
                # thirteenth of the bytes.
                STATE: ocp.PyTreeCheckpointHandler(
                    multiprocessing_options=together,
                    enable_pinned_host_transfer=False,
                    use_compression=False,
                ),
                METADATA: ocp.JsonCheckpointHandler(multiprocessing_options=together),
                CHECKSUMS: ChecksumHandler(process_index(), main=is_main()),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_policy(keep_last, keep_best),
                best_fn=_loss,
                best_mode="min",
                create=False,
                cleanup_tmp_directories=True,
                todelete_subdir=DELETED,
                # The thread of this class is the background: Orbax's own threads wait for minutes
                # for folders that could not be made, and forget the old checkpoints.
                enable_async_checkpointing=False,
                multiprocessing_options=together,
            ),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._awaited = threading.Event()

    def save(
        self,
        state: Any,
        metadata: CheckpointMetadata,
        *,
        loss: float | None = None,
        finite: Any = True,
    ) -> Saved | None:
        """Write arrays in canonical form, which nothing else may donate, in the background.

        Waits for the previous save first, and returns its outcome. ``finite`` may still be being
        computed; if it is false, nothing is written, and the outcome is `StateNotFinite`. The loss
        ranks checkpoints for ``keep_best``.
        """
        previous = self.wait()
        self._pending = self._thread.submit(self._save, state, metadata, loss, finite)
        return previous

    def wait(self) -> Saved | None:
        """Wait for the save in progress, if any, and return its outcome."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._awaited.set()
        try:
            return pending.result()
        finally:
            self._awaited.clear()

    def finished(self) -> Saved | None:
        """Return the outcome of the last save if it is complete, without waiting."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def close(self) -> Saved | None:
        """Wait for the save in progress and release resources; safe to call again."""
        last = self.wait()
        self._thread.shutdown()
        self._manager.close()
        return last

    def _save(
        self, state: Any, metadata: CheckpointMetadata, loss: float | None, finite: Any
    ) -> Saved:
        started = time.perf_counter()
        error: Exception | None = None
        reason = fix = ""
        with quiet_failures() as failures:
            try:
                jax.block_until_ready(state)
                if not bool(np.asarray(finite)):
                    raise StateNotFinite(metadata.step)
                _bring_to_host(state, self._awaited)
                self._write(state, metadata, loss)
                # Everything is on disk then. The next save follows in the same thread.
                self._thread.submit(_remove_deleted, self.folder)
            except StateNotFinite as caught:
                error, reason = caught, str(caught)
            except Exception as caught:
                # Training continues whatever went wrong; the caller reports it.
                failures.append(caught)
        for failure in failures:
            if is_main():
                for left in self.folder.glob(f"{metadata.step}.orbax-checkpoint-tmp*"):
                    shutil.rmtree(left, ignore_errors=True)
            error = failure
            reason, fix = _why_not_saved(self.folder, state, failure)
        return Saved(metadata.step, time.perf_counter() - started, error, reason, fix)

    def _write(self, state: Any, metadata: CheckpointMetadata, loss: float | None) -> None:
        values = asdict(metadata)
        # Orbax would make a folder anew that was moved away, and the older checkpoints with it.
        with os.scandir(self.folder):
            pass
        loss = loss if loss is not None and math.isfinite(loss) else None
        parts = {
            STATE: ocp.args.PyTreeSave(state, ocdbt_target_data_file_size=FILE_BYTES),
            METADATA: ocp.args.JsonSave(values),
            CHECKSUMS: ChecksumSave(state, values, loss),
        }
        metrics = None if loss is None else {"loss": loss}
        args = ocp.args.Composite(**parts)
        self._manager.save(metadata.step, args=args, metrics=metrics, force=True)
        if is_main():
            # A checkpoint without its checksums would be taken for damaged later.
            read_checksums(self.folder / str(metadata.step) / CHECKSUMS)


def _bring_to_host(state: Any, awaited: threading.Event) -> None:
    """List the shards of every array, and copy those to write to the host, before threads do.

    JAX lists them on first use. Before release 0.12, threads that do so at the same time may get
    only some of them, and the others would be missing in the checkpoint. JAX keeps the copies.

    Copied one after the other, arrays share a buffer in page-locked memory, which takes long to
    allocate, and the steps keep most of the link. While someone waits for the save, no step runs,
    and several arrays are copied at a time.
    """
    copying: deque[Any] = deque()
    size = 0
    for array in jax.tree.leaves(state):
        if isinstance(array, jax.Array):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
                    copying.append(shard.data)
                    size += shard.data.nbytes
                while copying and size > (IN_FLIGHT_BYTES if awaited.is_set() else 0):
                    size -= np.asarray(copying.popleft()).nbytes
    for data in copying:
        np.asarray(data)


def _make_folder(folder: Path) -> None:
    """Make the folder on process 0; raise the same error on all processes."""
    if problem := attempt_on_main(lambda: folder.mkdir(parents=True, exist_ok=True)):
        raise UserError(
            f"cannot write checkpoints to {folder}",
            why=problem,
            fix=f"write {Setting('hydra.run.dir', ANY)} with a folder you can write to, or "
            f"{Setting('checkpoint.enabled', False)}",
        )


def _set_aside_unreadable(folder: Path) -> None:
    """Set aside checkpoints whose loss Orbax could not read: it would refuse the whole folder."""
    if is_main():
        for step in CheckpointReader(folder).steps():
            path = folder / str(step)
            if not has_readable_metrics(path):
                logger.warning("%s is damaged: metrics/metrics cannot be read", path)
                set_aside(folder, step)
    # The others list the folder afterwards.
    broadcast(None)


def _remove_deleted(folder: Path) -> None:
    """Delete the old checkpoints that were moved."""
    if is_main():
        shutil.rmtree(folder / DELETED, ignore_errors=True)


def _why_not_saved(folder: Path, state: Any, error: Exception) -> tuple[str, str]:
    """Return the reason of a failed save with its numbers, and a fix: not always disk space."""
    other = f"choose another {Setting('hydra.run.dir')}"
    if not folder.exists():
        reason = f"{folder} is not there any more: it was moved or deleted during the run"
        return reason, f"move it back, or {other}"
    needed = sum(array.nbytes for array in jax.tree.leaves(state))
    try:
        free = shutil.disk_usage(folder).free
    except OSError as problem:
        return f"{first_line(problem)}: {folder}", other
    short = _short(error)
    full = free < 2 * needed or short in _FULL
    reason = (
        f"{short}; a checkpoint takes up to {human_bytes(needed)}, and {human_bytes(free)} are "
        f"free in {folder}"
    )
    return reason, f"free disk space or {other}" if full else other


_FULL = ("No space left on device", "File too large", "Disk quota exceeded")


def _short(error: Exception) -> str:
    """Return an error without the paths that libraries put before its reason."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = first_line(error)
    return next((reason for reason in _FULL if reason in line), line)


def _policy(keep_last: int, keep_best: int) -> policies.PreservationPolicy:
    best = policies.BestN(
        get_metric_fn=lambda metrics: -_loss(metrics),
        n=keep_best,
        keep_checkpoints_without_metrics=False,
    )
    return policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])


def _loss(metrics: Any) -> float:
    loss = float(metrics["loss"])
    return loss if math.isfinite(loss) else math.inf
