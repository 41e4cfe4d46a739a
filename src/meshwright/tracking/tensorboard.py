"""Tracking with TensorBoard, through its own event writer."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.tracking.tracker import Tracker


class TensorBoardTracker(Tracker):
    """Writes ``train/loss`` and the like, but no events, to ``tensorboard/`` in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open an event file; TensorBoard reads those of a folder one after the other."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The queue is long, because a full queue would make training wait for the disk.
        self._writer = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=10)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write each metric as a scalar at this step."""
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        scalars = [
            summaries.Summary.Value(tag=f"{split}/{name}", simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        summary = summaries.Summary(value=scalars)
        self._writer.add_event(events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self, result: Mapping[str, Any]) -> None:
        """Write what is queued and close the file."""
        if self._writer is not None:
            self._writer.close()
