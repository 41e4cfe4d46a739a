"""A process that calls reward functions; `RewardProcesses` starts it as a program."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

READY = "ready"


def import_function(name: str) -> Callable[..., Any]:
    """Return what ``package.module:Name`` names."""
    module, _, attribute = name.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


def serve(connection: Connection, names: Sequence[str]) -> None:
    """Import the functions, then call them as asked, until the other end is closed.

    An answer has a pair for each call: what was returned, and what went wrong.
    """
    functions: list[Callable[..., Any]] = []
    try:
        functions = [import_function(name) for name in names]
    except BaseException as error:
        connection.send((None, describe(error)))
        return
    connection.send((READY, ""))
    while True:
        try:
            number, arguments = connection.recv()
        except EOFError:
            return
        connection.send([call(functions[number], each) for each in arguments])


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, str]:
    """Return what a reward function returns as numbers, and what went wrong."""
    try:
        returned = function(**arguments)
        if isinstance(returned, str):
            return None, f"it returned the text {returned[:80]!r}"
        # Arrays without dimensions have a length that cannot be asked for.
        one = getattr(returned, "ndim", None) == 0 or not hasattr(returned, "__len__")
        values = [returned] if one else list(returned)
        if any(value is None for value in values):
            return None, "it returned None"
        values = [float(value) for value in values]
    except Exception as error:
        return None, describe(error)
    return values, ""


def describe(error: BaseException) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    handle, _folders, *_names = sys.argv[1:]
    sys.path[:] = [folder for folder in _folders.split(os.pathsep) if folder]
    serve(Connection(int(handle)), _names)
