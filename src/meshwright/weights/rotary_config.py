"""What config.json says of rotary positions, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import check_value
from meshwright.weights.family import HfConfig

ROTARY = {"rope_theta": 10_000.0, "rope_scaling": {}, "rope_parameters": {}}
"""Keys of config.json for rotary positions, each with a value of its type."""


def rotary(
    config: HfConfig, base: float, *, layers: str = "full_attention", base_key: str = "rope_theta"
) -> dict[str, Any]:
    """Return the rotary settings of one kind of layer: rope_type, rope_theta and its numbers.

    Args:
        config: the config.json.
        base: the base, where config.json leaves it out.
        layers: which layers, where they differ.
        base_key: the key of the base in the spelling of transformers 4.
    """
    found: Mapping[str, Any] = config.get("rope_parameters") or {}
    for key, value in found.items():
        if key.endswith("_attention") and value is not None:
            check_value(f"rope_parameters.{key}", value, {})
    found = found.get(layers) or ({} if "sliding_attention" in found else found)
    if not found and layers == "full_attention":
        found = config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta") or config.get(base_key) or base
    check_value("rope_theta", theta, base)
    return {**found, "rope_type": kind or "default", "rope_theta": float(theta)}


def scaling_numbers(settings: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the numbers of scaled rotary positions; refuse settings that lack one."""
    for key in keys:
        check_value(f"rope_scaling.{key}", settings.get(key), 1.0)
    return {key: settings[key] for key in keys}


def refuse_other_scaling(settings: Mapping[str, Any], *known: str) -> None:
    """Refuse a kind of rotary positions that the model does not compute."""
    if settings["rope_type"] not in known:
        raise UserError(
            f"rotary positions of the type {settings['rope_type']} cannot be computed",
            why=f"config.json asks for them; known types: {', '.join(known)}",
        )
