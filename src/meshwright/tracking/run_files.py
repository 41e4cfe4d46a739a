"""The files of a run folder: written during the run, and read again for services."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from meshwright.text.json_text import finite, parse_json, read_object, write_atomically
from meshwright.tracking.tracker import Tracker


class RunFiles(Tracker):
    """A tracker that writes the files of a run folder, one line at a time.

    A resumed run appends to the same files. Numbers that JSON cannot hold (NaN, infinity) are
    written as null.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def start(self, facts: Mapping[str, Any]) -> None:
        """Write run.json; a resumed run keeps its first start time, and its name."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        written = {"format": 1, "started": now, **facts}
        path = self._folder / "run.json"
        if earlier := read_object(path):
            written["started"] = earlier.get("started", written["started"])
            written["name"] = written.get("name") or earlier.get("name")
            written["resumed"] = [*earlier.get("resumed", []), now]
        # A result from before the interruption is out of date.
        (self._folder / "result.json").unlink(missing_ok=True)
        _write(path, written)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        own = {"split": split, "step": step, "time": time.time()}
        self._append("metrics.jsonl", own | {k: v for k, v in values.items() if k not in own})

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Append a line to events.jsonl."""
        own = {"time": time.time(), "step": step, "kind": kind, "message": message}
        self._append("events.jsonl", {**details, **own})

    def close(self, result: Mapping[str, Any]) -> None:
        """Write result.json, unless it is empty, and close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if result:
            _write(self._folder / "result.json", result)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._files:
            path = self._folder / name
            repair_last_line(path)
            self._files[name] = path.open("ab")
        line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False, default=str)
        # One write and one flush, so that a killed process truncates at most the last line.
        self._files[name].write(line.encode() + b"\n")
        self._files[name].flush()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, if it can be read; truncated lines are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    yield from (record for record in map(parse_json, lines) if isinstance(record, dict))


def read_metrics(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the metrics of metrics.jsonl by split and step, in the order of steps.

    If a split and step has two lines, the later one counts: a run resumed from a checkpoint has
    repeated that step. Values that were not finite are None.
    """
    metrics: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_lines(path):
        split, step = line.get("split"), line.get("step")
        if isinstance(split, str) and isinstance(step, int):
            others = {k: v for k, v in line.items() if k not in ("split", "step", "time")}
            metrics[split, step] = others
    return dict(sorted(metrics.items(), key=lambda row: row[0][1]))


def repair_last_line(path: Path) -> None:
    """Make a JSON Lines file end with a complete line: finish the last one, or remove it."""
    if not path.exists():
        return
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    last = content[start:]
    if not last:
        return
    with path.open("r+b") as file:
        if isinstance(parse_json(last), dict):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(path, text + "\n")


_SHORT_FACTS = ("plan", "mesh", "devices", "parameters", "global_batch_size", "versions", "dataset")
"""Facts that are sent with the settings; tables and drawings are left to the report."""


def run_name(folder: Path, facts: Mapping[str, Any]) -> str:
    """Return the name a run was given, or the end of its folder's path: its date and its time."""
    # A resumed run keeps the name in run.json.
    given = facts.get("name") or read_object(folder / "run.json").get("name")
    return given if isinstance(given, str) and given else "/".join(folder.absolute().parts[-2:])


def service_settings(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the run folder's config.json, and the short facts, by name."""
    try:
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {str(entry["key"]): entry["value"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        # A run from Python has no such file.
        settings = {}
    return settings | {f"run_{name}": facts[name] for name in _SHORT_FACTS if facts.get(name)}
