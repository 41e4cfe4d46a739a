"""Where each value of a config comes from: a default, a file, or an override."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.compose import Composed, canonical_key, parse_overrides
from meshwright.config.groups import CONF_DIR, GROUPS
from meshwright.config.schema import Config
from meshwright.text.json_text import flatten
from meshwright.text.masking import mask_text, mask_value
from meshwright.text.yaml_text import read_yaml


@dataclass(frozen=True)
class Origin:
    """One value and what set it: ``default``, ``file`` or ``override``, and which of them."""

    key: str
    value: Any
    source: str
    detail: str


def trace_origins(config: Config, composed: Composed) -> list[Origin]:
    """Return every value of a config with its origin, in the schema's order; secrets are hidden."""
    composed_keys = {canonical_key(key) for key, _ in flatten(composed.values)}
    from_files = _file_keys(composed)
    from_overrides = {
        canonical_key(o.key_or_group): mask_text(o.input_line or "")
        for o in parse_overrides(composed.overrides)
        if not o.is_delete() and o.key_or_group not in GROUPS
    }

    def origin(key: str, value: Any) -> Origin:
        if key in composed.read_from:
            return Origin(key, value, "file", composed.read_from[key])
        if key not in composed_keys:
            return Origin(key, value, "default", "")
        if match := _longest_prefix(key, from_overrides):
            return Origin(key, value, "override", from_overrides[match])
        match = _longest_prefix(key, from_files)
        detail = from_files[match] if match else _chosen_file(key, composed)
        return Origin(key, value, "file", detail)

    return [
        origin(key, mask_value(key, value))
        for key, value in flatten(config.model_dump(mode="json"))
    ]


def chosen_keys(config: Config, composed: Composed) -> set[str]:
    """Return the keys the user set, in an override or in a file of their own config folder."""
    folder = composed.config_dir
    return {
        origin.key
        for origin in trace_origins(config, composed)
        if origin.source == "override"
        or (origin.source == "file" and folder is not None and (folder / origin.detail).is_file())
    }


def set_by_user(config: Config, composed: Composed) -> set[str]:
    """Return the keys that the user has decided: by an override, a file, or a chosen group."""
    groups = {o.key_or_group for o in parse_overrides(composed.overrides)} & set(GROUPS)
    files = {f"{group}/{composed.choices[group]}.yaml" for group in groups & set(composed.choices)}
    of_groups = {o.key for o in trace_origins(config, composed) if o.detail in files}
    return chosen_keys(config, composed) | of_groups


def _longest_prefix(key: str, known: dict[str, str]) -> str:
    """Return the longest known path that sets ``key`` or a section that holds it."""
    parts = key.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), "")


def _file_keys(composed: Composed) -> dict[str, str]:
    keys: dict[str, str] = {}
    # The experiment overlays the groups, so it is read last.
    for group, choice in sorted(composed.choices.items(), key=lambda c: c[0] == "experiment"):
        path = _find(group, choice, composed.config_dir)
        if path is None:
            continue
        package = "" if group == "experiment" else f"{group}."
        loaded = read_yaml(path.read_text(encoding="utf-8"))
        named = {str(key): value for key, value in (loaded or {}).items() if key != "defaults"}
        for key, _ in flatten(named):
            keys[canonical_key(f"{package}{key}")] = f"{group}/{choice}.yaml"
    return keys


def _chosen_file(key: str, composed: Composed) -> str:
    """Return the file chosen for a key's group; a file it builds on may have set the key."""
    if composed.config_file is not None:
        return str(composed.config_file)
    group = key.partition(".")[0]
    return f"{group}/{composed.choices[group]}.yaml" if group in composed.choices else "config.yaml"


def _find(group: str, choice: str, config_dir: Path | None) -> Path | None:
    for root in (config_dir, CONF_DIR):
        if root is not None and (path := root / group / f"{choice}.yaml").is_file():
            return path
    return None
