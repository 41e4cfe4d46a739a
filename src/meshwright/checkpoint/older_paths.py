"""Paths in checkpoints of earlier versions, which wrote special characters otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from meshwright.program.jaxpr.names import older_path

_Value = TypeVar("_Value")


def names_on_disk(paths: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return the name that each path has among the saved ones.

    A name of earlier versions counts if only one path can be meant.
    """
    paths, known = list(paths), set(saved)
    names = {path: path for path in paths}
    older: dict[str, list[str]] = {}
    for path in paths:
        if path not in known:
            older.setdefault(older_path(path), []).append(path)
    for name, meant in older.items():
        if name in known and name not in names and len(meant) == 1:
            names[meant[0]] = name
    return names


def as_named_now(saved: Mapping[str, _Value], paths: Iterable[str]) -> dict[str, _Value]:
    """Return saved values by the paths of today; names that belong to no path stay."""
    now = {name: path for path, name in names_on_disk(paths, saved).items()}
    return {now.get(name, name): value for name, value in saved.items()}
