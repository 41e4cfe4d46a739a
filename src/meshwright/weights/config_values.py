"""Values of a config.json: of the right type and size, or refused by key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import UserError


class WrongValue(ValueError):
    """A value of config.json that no model can have.

    Attributes:
        key: its key.
        value: the value; None if it is null or missing.
        expected: what it has to be.
    """

    def __init__(self, key: str, value: Any, expected: str) -> None:
        super().__init__(f"{key}={json.dumps(value)} is not {expected}")
        self.key, self.value, self.expected = key, value, expected


def complete(
    config: Mapping[str, Any], defaults: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a config.json with the defaults of those that it leaves out.

    Args:
        config: the config.json.
        defaults: the values of keys that it may leave out, of the types that it may have.
        optional: keys that have no default and may be null, each with a value of its type.
    """
    for key in {**defaults, **optional}.keys() & config.keys():
        may_be_null = key in optional or isinstance(defaults[key], bool)
        if config[key] is not None or not may_be_null:
            check_value(key, config[key], {**defaults, **optional}[key])
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}


def check_value(key: str, value: Any, example: Any) -> None:
    """Raise `WrongValue` for a value that is not like the example."""
    expected, right = _rule(value, example)
    if not right:
        raise WrongValue(key, value, expected)


def _rule(value: Any, example: Any) -> tuple[str, bool]:
    """Return what a value has to be, and whether it is."""
    if isinstance(example, bool):
        return "true or false", isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(example, int):
        return "a whole number, 1 or more", whole and value > 0
    if isinstance(example, float):
        number = whole or isinstance(value, float)
        return "a number, 0 or more", number and math.isfinite(value) and value >= 0
    if isinstance(example, str):
        return "text", isinstance(value, str)
    if isinstance(example, list):
        return "a list", isinstance(value, list)
    return "an object with keys", isinstance(value, Mapping)


ROTARY = {"rope_theta": 10_000.0, "rope_scaling": {}, "rope_parameters": {}}
"""Keys of config.json for rotary positions, each with a value of its type."""


def rotary(
    config: Mapping[str, Any],
    base: float,
    *,
    layers: str = "full_attention",
    base_key: str = "rope_theta",
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
    """Refuse a kind of rotary positions that the model does not support."""
    if settings["rope_type"] not in known:
        raise UserError(
            f"rotary positions of the type {settings['rope_type']} are not supported",
            why=f"config.json asks for them; known types: {', '.join(known)}",
        )
