"""JSON that any program can read: numbers it cannot hold, and text that is cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
