"""How module paths are written into a program, and read back from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MODULE_MARK = "~"
"""Opens the scope name of a module call: ``jax.named_scope(MODULE_MARK + "blocks.0.mlp")``.

Not ``@``: XLA cuts an op name at the first ``@`` (it is MLIR's separator of name and type), which
loses the module, every scope after it and the primitive. Not ``:`` or ``;`` either, which XLA puts
between the names of operations it has merged.
"""

_MODULE = re.compile(rf"(?:^|[/(:;]){re.escape(MODULE_MARK)}([^/():;]+)")
_RESERVED = re.compile(r"[/():;@\s]")


def path_text(path: Iterable[Any]) -> str:
    """Return a path as text: ``blocks.0.mlp.up``; characters scope names cannot hold become _."""
    return ".".join(_RESERVED.sub("_", str(part)) for part in path)


def module_of(op_name: str) -> str:
    """The innermost module path in a name stack or op name: the last scope opened by the mark.

    ``jit(step)/transpose(jvp(~blocks.0.mlp))/~blocks.0.mlp.up/dot_general`` is in
    ``blocks.0.mlp.up``; jvp, transpose and remat wrap names and are looked through.
    """
    found = _MODULE.findall(op_name)
    return found[-1] if found else ""


def modules_of(op_name: str) -> list[str]:
    """Every module path in a name stack, outermost first."""
    return _MODULE.findall(op_name)


def rename_module(scopes: str, old: str, new: str) -> str:
    """Return a name stack with a module, and all modules inside it, under another path."""
    if old == new:
        return scopes
    first, other = MODULE_MARK + old, MODULE_MARK + new
    return "/".join(
        other + part[len(first) :] if part == first or part.startswith(first + ".") else part
        for part in scopes.split("/")
    )
