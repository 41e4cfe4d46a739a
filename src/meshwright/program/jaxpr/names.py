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
    """Return the innermost module path in a name stack or op name; empty if it has none.

    ``jit(step)/transpose(jvp(~blocks.0.mlp))/~blocks.0.mlp.up/dot_general`` is in
    ``blocks.0.mlp.up``; the names that jvp, transpose and remat add around scopes are ignored.
    """
    paths = _MODULE.findall(op_name)
    return paths[-1] if paths else ""


def modules_of(op_name: str) -> list[str]:
    """Return all module paths in a name stack, outermost first."""
    return _MODULE.findall(op_name)


def rename_module(scopes: str, old: str, new: str) -> str:
    """Return a name stack in which a module, and all modules inside it, have another path."""
    if old == new:
        return scopes
    before, after = MODULE_MARK + old, MODULE_MARK + new
    return "/".join(
        after + scope[len(before) :] if scope == before or scope.startswith(before + ".") else scope
        for scope in scopes.split("/")
    )
