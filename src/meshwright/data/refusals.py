"""Errors about what users pass as data and cannot be: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import UserError

_FORMS = "write a dict of arrays such as {'x': x, 'y': y}, or a list of batches"


def refuse_class(given: object) -> None:
    """Raise for a class, which has the methods of data but no samples."""
    if isinstance(given, type):
        raise UserError(
            f"the data are the class {given.__name__}",
            why="only an object of it has samples",
            fix=f"write {given.__name__}(…)",
        )


def refuse_wrong_data(given: Any) -> None:
    """Raise for values that hold no samples, or in a form that says too little about them."""
    kind = type(given).__name__
    if given is None:
        raise UserError("the data are None", why="there is nothing to read from", fix=_FORMS)
    if isinstance(given, str | bytes | Path):
        raise UserError(
            f"the data are a single {kind}",
            why="a path does not say how its files are read",
            fix="read the file first: dict(np.load(path)) for .npz; "
            "meshwright train data.path=… reads other formats",
        )
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        raise UserError(
            f"the data are a {kind}",
            why="each update takes a batch of arrays",
            fix="write {name: data[name].to_numpy() for name in data.columns}",
        )
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        raise UserError(
            f"the data are a single {kind}", why="each update takes a batch of samples", fix=_FORMS
        )
    if isinstance(given, tuple) and given and all(hasattr(part, "shape") for part in given):
        raise UserError(
            f"the data are a tuple of {len(given)} arrays",
            why="these could be separate batches, or the fields of one dataset",
            fix=_FORMS,
        )
    if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
        odd = next(name for name in given if not isinstance(name, str))
        raise UserError(
            "the arrays of the dataset have no names",
            why=f"a key is {odd!r}, of type {type(odd).__name__}",
            fix="write a dict of arrays such as {'x': x, 'y': y}",
        )
    if isinstance(given, set | frozenset):
        raise UserError(f"the data are a {kind}", why="its order is not fixed", fix=_FORMS)


def no_batches(given: Any) -> UserError:
    """Return the error about a value that is no data of any kind."""
    return UserError(
        f"the data are of type {type(given).__name__}, which provides no batches",
        fix="write a dict of arrays, a function of (step, batch_size), or a list of batches",
    )
