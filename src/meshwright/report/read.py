"""Reading a run folder, even if files are missing or incomplete."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from meshwright.config.origins import flatten
from meshwright.text.json_text import parse_json
from meshwright.text.masking import mask_tree, mask_value
from meshwright.tracking.run_files import read_lines, read_metrics, run_name

MAX_POINTS = 2000
"""Points of one curve on a page; a longer curve is reduced to the extremes of each interval."""
MAX_EVENTS = 1000

Points = list[tuple[int, float | None]]


def read_run(folder: Path) -> dict[str, Any]:
    """Return everything a page shows about a run; missing parts are None or empty."""
    facts = _json(folder / "run.json")
    facts = facts if isinstance(facts, dict) else {}
    profile, ledger, result = (
        _json(folder / f"{name}.json") for name in ("profile", "ledger", "result")
    )
    events = list(read_lines(folder / "events.jsonl"))[-MAX_EVENTS:]
    return {
        "name": run_name(folder, facts),
        "path": str(folder.absolute()),
        "facts": facts,
        "result": result if isinstance(result, dict) else None,
        "curves": read_curves(folder / "metrics.jsonl"),
        "profile": profile if isinstance(profile, dict) else None,
        "ledger": ledger if isinstance(ledger, dict) else None,
        "config": _config(folder),
        "events": events,
        "failure": _failure(events, facts),
    }


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Return the curves of metrics.jsonl: split, metric, number of values, points to draw."""
    curves: dict[tuple[str, str], Points] = {}
    for (split, update), values in read_metrics(path).items():
        for name, value in values.items():
            if _is_value(value):
                curves.setdefault((split, name), []).append((update, value))
    return [
        {"split": split, "metric": name, "count": len(points), "points": downsample(points)}
        for (split, name), points in curves.items()
    ]


def downsample(points: Points, most: int = MAX_POINTS) -> Points:
    """Return at most ``most`` points: the first, the last, and each interval's extremes."""
    if len(points) <= most:
        return points
    intervals = most // 2 - 1
    chosen = {0, len(points) - 1}
    for number in range(intervals):
        start, stop = (len(points) * n // intervals for n in (number, number + 1))
        heights = [(value, at) for at in range(start, stop) if (value := points[at][1]) is not None]
        chosen |= {at for _, at in (min(heights), max(heights))} if heights else {start}
    return [points[at] for at in sorted(chosen)]


def _failure(events: list[dict[str, Any]], facts: dict[str, Any]) -> str | None:
    """Return why a run failed; None if it did not, or was started again."""
    last = events[-1] if events else {}
    if last.get("kind") != "stop" or not last.get("failed"):
        return None
    resumed, stopped = facts.get("resumed"), last.get("time")
    started = resumed[-1] if isinstance(resumed, list) and resumed else facts.get("started")
    if isinstance(started, str) and isinstance(stopped, int | float):
        try:
            # Starts are given in whole seconds.
            if datetime.fromisoformat(started).timestamp() > stopped:
                return None
        except ValueError:
            pass
    return str(last.get("message", "failed"))


def _is_value(value: Any) -> bool:
    # Null is a number that was not finite; it becomes a gap in the curve.
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _config(folder: Path) -> list[dict[str, Any]]:
    entries = _json(folder / "config.json")
    if isinstance(entries, list):
        return [_masked(entry) for entry in entries if isinstance(entry, dict) and "key" in entry]
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(values, dict):
        return []
    return [_masked({"key": k, "value": v, "origin": ""}) for k, v in flatten(values)]


def _masked(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a setting without secrets, which old runs have written."""
    shown = mask_tree(entry)
    return shown | {"value": mask_value(str(entry["key"]), entry.get("value"))}


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError:
        return None
