"""Reports about runs: finding run folders, reading them even if incomplete, and the HTML page."""

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import UserError
from meshwright.runtime.versions import own_version
from meshwright.text.json_text import finite, flatten, parse_json, read_object
from meshwright.text.masking import mask_tree, mask_value
from meshwright.text.yaml_text import read_yaml
from meshwright.tracking.run_files import read_lines, read_metrics, run_name

RUN_FILES = ("run.json", "metrics.jsonl")
"""A folder that contains one of these files is a run folder."""
MAX_DEPTH = 5
"""Levels below a folder that are searched; runs of a sweep are five levels below multirun."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders at these paths, each once.

    A path that is not a run folder stands for the runs inside it, newest first.
    """
    found: dict[Path, None] = {}
    for path in paths:
        found |= dict.fromkeys([path] if is_run(path) else _runs_inside(path))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return any((folder / name).is_file() for name in RUN_FILES)


def _runs_inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}",
            fix="give a run folder, such as outputs/<project>/<date>/<time>",
        )
    runs = sorted(_walk(folder, MAX_DEPTH), key=_newest, reverse=True)
    if not runs:
        raise UserError(
            f"{folder} is not a run folder, and contains none",
            why=f"there is no {' or '.join(RUN_FILES)} in it or in the folders inside it",
            fix="give a run folder, such as outputs/<project>/<date>/<time>",
        )
    return runs


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            inside = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inside:
            yield from _walk(path, depth - 1)


def _newest(run: Path) -> tuple[float, str]:
    return max((run / m).stat().st_mtime for m in RUN_FILES if (run / m).is_file()), str(run)


MAX_POINTS = 2000
"""Points of one curve on a page; a longer curve is reduced to the extremes of each interval."""
MAX_EVENTS = 1000
MAX_COMPLETIONS = 64

Points = list[tuple[int, float | None]]


def read_run(folder: Path) -> dict[str, Any]:
    """Return everything a page shows about a run; missing parts are None or empty."""
    facts = read_object(folder / "run.json")
    profile, ledger, result, samples = (
        _json(folder / f"{name}.json") for name in ("profile", "ledger", "result", "samples")
    )
    every_event = list(read_lines(folder / "events.jsonl"))
    events = every_event[-MAX_EVENTS:]
    return {
        "name": run_name(folder, facts),
        "path": str(folder.absolute()),
        "facts": facts,
        "seconds": _seconds(facts, [*every_event, *read_lines(folder / "metrics.jsonl")]),
        "result": result if isinstance(result, dict) else None,
        "curves": read_curves(folder / "metrics.jsonl"),
        "profile": profile if isinstance(profile, dict) else None,
        "ledger": ledger if isinstance(ledger, dict) else None,
        "samples": samples if isinstance(samples, list) else [],
        "config": _config(folder),
        "completions": _completions(folder) or _answers(every_event, result),
        "events": events,
        "failure": _failure(events, facts),
    }


def _completions(folder: Path) -> list[dict[str, Any]]:
    """Return completions of the newest rollout, each with its reward; empty without any."""
    files = sorted((folder / "completions").glob("*.jsonl"))
    lines = list(read_lines(files[-1]))[:MAX_COMPLETIONS] if files else []
    keys = ("prompt", "completion", "reward", "advantage")
    shown = [{key: line.get(key) for key in keys} for line in lines]
    return [
        {key: v if isinstance(v, str | float | int | None) else str(v) for key, v in each.items()}
        for each in shown
    ]


def _answers(events: list[dict[str, Any]], result: Any) -> list[dict[str, Any]]:
    """Return the model's answers to prompts of conversations, by step; empty without any."""
    end = {**result, "step": result.get("steps")} if isinstance(result, dict) else {}
    shown = {
        (str(each[0]), event.get("step")): str(each[1])
        for event in [*(event for event in events if event.get("kind") == "sample"), end]
        for each in event.get("completions") or ()
    }
    order = list(dict.fromkeys(prompt for prompt, _ in shown))
    rows = sorted(shown.items(), key=lambda each: order.index(each[0][0]))
    return [{"prompt": p, "step": step, "completion": said} for (p, step), said in rows]


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Return the curves of metrics.jsonl: split, metric, number of values, points to draw."""
    curves: dict[tuple[str, str], Points] = {}
    for (split, step), values in read_metrics(path).items():
        for name, value in values.items():
            # Null is a number that was not finite; it becomes a gap in the curve.
            if isinstance(value, int | float | None) and not isinstance(value, bool):
                curves.setdefault((split, name), []).append((step, value))
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


def _seconds(facts: dict[str, Any], lines: list[dict[str, Any]]) -> float | None:
    """Return the time of all attempts of a resumed run; None for one that was never resumed.

    An attempt took as long as it said at its end, or else from its start to its last line.
    """
    resumed = facts.get("resumed")
    given = [facts.get("started"), *(resumed if isinstance(resumed, list) else [])]
    starts = [at for text in given if (at := _timestamp(text)) is not None]
    if len(starts) < 2:
        return None
    total = 0.0
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        own = [line for line in lines if start <= _number(line.get("time")) < end]
        stated = [_number(line.get("seconds")) for line in own if line.get("kind") == "stop"]
        last = max((_number(line["time"]) for line in own), default=start)
        total += stated[-1] if any(stated[-1:]) else last - start
    return total


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def _timestamp(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _failure(events: list[dict[str, Any]], facts: dict[str, Any]) -> str | None:
    """Return why a run failed; None if it did not, or was restarted."""
    last = events[-1] if events else {}
    if last.get("kind") != "stop" or not last.get("failed"):
        return None
    resumed, stopped = facts.get("resumed"), last.get("time")
    last_start = resumed[-1] if isinstance(resumed, list) and resumed else facts.get("started")
    started = _timestamp(last_start)
    # Starts are given in whole seconds.
    if started is not None and isinstance(stopped, int | float) and started > stopped:
        return None
    return str(last.get("message", "failed"))


def _config(folder: Path) -> list[dict[str, Any]]:
    entries = _json(folder / "config.json")
    if isinstance(entries, list):
        return [_masked(entry) for entry in entries if isinstance(entry, dict) and "key" in entry]
    try:
        values = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(values, dict):
        return []
    return [_masked({"key": k, "value": v, "origin": ""}) for k, v in flatten(values)]


def _masked(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a setting without secrets."""
    return mask_tree(entry) | {"value": mask_value(str(entry["key"]), entry.get("value"))}


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError:
        return None


_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("elements.js", "words.js", "chart.js", "tables.js", "sections.js",
            "labels.js", "page.js")  # fmt: skip


def make_page(runs: Sequence[dict[str, Any]], *, left_out: int = 0) -> str:
    """Return an HTML page about runs from `read_run`, with the first one in focus.

    The page loads nothing from elsewhere. The contents of the runs' files are only data to it:
    its content security policy allows no script but its own. It mentions how many are left out.
    """
    name = f"{runs[0]['facts'].get('project', 'run')} {runs[0]['name']}"
    name = f"{len(runs)} runs" if len(runs) > 1 else name
    script = "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n{script}'
    data = {"version": own_version(), "left_out": left_out, "runs": list(runs)}
    parts = {
        # File names may contain bytes that are not text.
        "title": html.escape(f"{name} · Meshwright".encode(errors="replace").decode()),
        "style": (_ASSETS / "style.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Only "<" could end the element that contains the data.
        "data": json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (_ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
