"""Copies of modules: finding the module a copy was made of by the leaves that it reads.

Transforms (`nnx.remat`, `nnx.jit`) and `nnx.merge` call copies of modules. While a loss is traced,
nothing links a copy to its original if the model has several modules of that class, so its scopes
are provisional: ``~?Block-3.up``. The leaves its equations read show which module it is a copy of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshwright.program.jaxpr.equations import Jaxpr, Literal, Var, name_stack
from meshwright.program.jaxpr.names import MODULE_MARK, modules_of, path_text

PathsByClass = Mapping[str, Sequence[str]]
"""By name of a class, the paths of its modules in the order of the model."""

_PROVISIONAL = re.compile(r"^(\?(.+)-\d+)(?:\.(.*))?$")
_UNRESOLVED = re.compile(rf"/?{re.escape(MODULE_MARK)}\?[^/():;]*")


def class_name(cls: type) -> str:
    """Return a class's name without characters that scope names cannot hold."""
    return path_text([cls.__name__])


def provisional_path(cls: type, number: int) -> str:
    """Return the provisional path of a copy of a module of this class."""
    return f"?{class_name(cls)}-{number}"


def is_provisional(path: str) -> bool:
    """Whether a path is that of a copy, or of a module inside one."""
    return path.startswith("?")


def find_originals(
    jaxpr: Jaxpr, leaves: Mapping[Var, str], paths_by_class: PathsByClass
) -> dict[str, str]:
    """Return, by provisional path, the path of the module that a copy was made of.

    Args:
        jaxpr: the program; the programs it calls are not searched.
        leaves: by input of the program, the path of the leaf.
        paths_by_class: the paths of the model's modules of each class.
    """
    candidates: dict[str, set[str]] = {}
    leaves = dict(leaves)
    for eqn in jaxpr.eqns:
        read = [leaves[a] for a in eqn.invars if not isinstance(a, Literal) and a in leaves]
        if read and eqn.primitive.name == "convert_element_type":
            leaves[eqn.outvars[0]] = read[0]
        modules = modules_of(name_stack(eqn)) if read else ()
        for match in filter(None, map(_PROVISIONAL.match, modules)):
            copy, cls, inner = match.groups()
            candidates.setdefault(copy, set()).update(
                path
                for path in paths_by_class.get(cls, ())
                if any(_contains(path, inner, leaf) for leaf in read)
            )
    # A leaf that several modules share has its path in the first of them, so the copy is of the
    # last candidate.
    order = {path: n for paths in paths_by_class.values() for n, path in enumerate(paths)}
    return {copy: max(paths, key=order.__getitem__) for copy, paths in candidates.items() if paths}


def _contains(path: str, inner: str | None, leaf: str) -> bool:
    return leaf.startswith(".".join(filter(None, (path, inner))) + ".")


def rename_copies(scopes: str, originals: Mapping[str, str]) -> str:
    """Return a name stack in which copies have their modules' paths; unknown ones are removed."""
    for copy, path in originals.items():
        scopes = re.sub(
            rf"{re.escape(MODULE_MARK + copy)}(?=[./():;]|$)", MODULE_MARK + path, scopes
        )
    return _UNRESOLVED.sub("", scopes).strip("/")
