"""YAML from users: aliases that repeat themselves, and nesting without end, are refused."""

from typing import Any

import yaml

MOST_VALUES = 100_000
"""Values of a file, counted as often as aliases repeat them."""
DEEPEST = 64
"""Levels of mappings and lists inside of each other."""


def read_yaml(text: str) -> Any:
    """Return the values of a YAML text; raise ValueError for one that would not end."""
    try:
        values = yaml.safe_load(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _count(values, {}, set(), 0) > MOST_VALUES:
        raise ValueError(f"with its aliases (*name) it has more than {MOST_VALUES:,} values")
    return values


_TOO_DEEP = f"it is nested more than {DEEPEST} levels deep"


def _count(value: Any, known: dict[int, int], inside: set[int], depth: int) -> int:
    """Return how many values there are if aliases are repeated."""
    if not isinstance(value, dict | list):
        return 1
    parts: Any = value.values() if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if id(value) in inside:
        raise ValueError("an alias (*name) is inside of what it stands for")
    if depth > DEEPEST:
        raise ValueError(_TOO_DEEP)
    if id(value) not in known:
        inside.add(id(value))
        known[id(value)] = 1 + sum(_count(part, known, inside, depth + 1) for part in parts)
        inside.discard(id(value))
    return known[id(value)]
