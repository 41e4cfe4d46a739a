"""The settings of a run that services receive besides its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SHORT_FACTS = ("plan", "mesh", "devices", "parameters", "global_batch_size", "versions", "dataset")
"""Facts that are sent with the settings; tables and drawings are left to the report."""


def run_name(folder: Path, facts: Mapping[str, Any]) -> str:
    """Return the name a run was given, or the end of its folder's path: its date and its time."""
    given = facts.get("name") or _saved_name(folder)
    return given if isinstance(given, str) and given else "/".join(folder.absolute().parts[-2:])


def _saved_name(folder: Path) -> Any:
    """Return the name in run.json, which a resumed run keeps."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError, AttributeError):
        return None


def service_settings(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the run folder's config.json, and the short facts, by name."""
    try:
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {str(entry["key"]): entry["value"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        # A run from Python has no such file.
        settings = {}
    return settings | {f"run_{name}": facts[name] for name in _SHORT_FACTS if facts.get(name)}
