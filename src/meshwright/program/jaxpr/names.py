"""How module paths are written into a program, and read back from it."""

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

MODULE_MARK = "~"
"""Opens the scope name of a module call: ``jax.named_scope(MODULE_MARK + "blocks.0.mlp")``.

Not ``@``: XLA cuts an op name at the first ``@`` (it is MLIR's separator of name and type), which
loses the module, every scope after it and the primitive. Not ``:`` or ``;`` either, which XLA puts
between the names of operations it has merged.
"""

_MODULE = re.compile(rf"(?:^|[/(:;]){re.escape(MODULE_MARK)}([^/():;]+)")
_RESERVED = re.compile(r"[/():;@\s.%*?]")
_ESCAPED = re.compile("(?:%[0-9A-F]{2})+|%")
_EMPTY = "%"


def path_text(path: Iterable[Any]) -> str:
    """Return a path as text: ``blocks.0.mlp.up``.

    What scope names cannot hold, and what has a meaning in paths and patterns, is escaped as in
    URLs, so that different paths have different texts: the key ``a.b`` is ``a%2Eb``. An empty key
    is ``%``.
    """
    return ".".join(_RESERVED.sub(_escape, str(part)) or _EMPTY for part in path)


def key_of(part: str) -> str:
    """Return the key that a part of a path stands for: ``a.b`` for ``a%2Eb``."""
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[0].replace("%", "")).decode(), part)


def nest(values: Mapping[str, Any], *, escaped: bool = False) -> dict[Any, Any]:
    """Return values by path as nested dicts, as NNX has them: the numbers of lists are integers.

    If ``escaped``, other keys stay as they are in paths, so that joined they are paths.
    """
    root: dict[Any, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        inner = root
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return _with_keys(root, escaped=escaped)


def _with_keys(tree: dict[str, Any], *, escaped: bool) -> dict[Any, Any]:
    # JAX sorts the keys of dicts that it flattens, so that they are all numbers or all texts.
    texts = escaped and not all(part.isdecimal() for part in tree)
    keyed: dict[Any, Any] = {}
    for part, value in tree.items():
        key = part if texts else int(part) if part.isdecimal() else key_of(part)
        keyed[key] = _with_keys(value, escaped=escaped) if isinstance(value, dict) else value
    return keyed


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path: ``*`` is one part of the path, ``**`` any number."""
    parts = [
        ".*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*")
        for part in pattern.split(".")
    ]
    return re.fullmatch(r"\.".join(parts), path) is not None


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


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that contains all of these; empty if none does."""
    steps = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))


def rename_module(scopes: str, old: str, new: str) -> str:
    """Return a name stack in which a module, and all modules inside it, have another path."""
    if old == new:
        return scopes
    before, after = MODULE_MARK + old, MODULE_MARK + new
    return "/".join(
        after + scope[len(before) :] if scope == before or scope.startswith(before + ".") else scope
        for scope in scopes.split("/")
    )
