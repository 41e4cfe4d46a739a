"""Values of a config.json: of the right type and size, or refused by key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


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
