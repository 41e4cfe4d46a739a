"""JSON: numbers it cannot hold, text that is cut off, files, and dotted keys."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """Return a value with null for every number that JSON cannot hold (NaN, infinity)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text, or None if it is not valid JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def parse_object(content: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text; empty if it is anything else."""
    value = parse_json(content)
    return value if isinstance(value, dict) else {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none that can be read."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return {}


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see either all of the new text or what was there before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
