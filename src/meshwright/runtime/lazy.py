"""Packages whose names load on first use, so that imports and help texts stay fast."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Its names are those that it imports for type checkers, under ``if TYPE_CHECKING:``.
    """
    spec: Any = sys.modules[package].__spec__
    program = ast.parse(spec.loader.get_data(spec.origin))
    blocks = (node for node in program.body if isinstance(node, ast.If))
    imports = (n for block in blocks for n in block.body if isinstance(n, ast.ImportFrom))
    names = {alias.name: n.module or "" for n in imports for alias in n.names}

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if names[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(names[name]), name)

    return load, lambda: sorted(names)
