"""Copies of modules: which of the model's modules a copy stands for, told by the leaves it reads.

Transforms (`nnx.remat`, `nnx.jit`) and `nnx.merge` call copies of modules. While a loss is traced
nothing links a copy to its original when the class has several places, so its scopes are
provisional: ``~?Block-3.up``. Which leaves its equations read decides where it belongs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshwright.program.jaxpr.equations import Jaxpr, Literal, Var, name_stack
from meshwright.program.jaxpr.names import MODULE_MARK, modules_of, path_text

Places = Mapping[str, Sequence[str]]
"""By name of a class, the paths of its modules in the order in which the model holds them."""

_TOKEN = re.compile(r"^(\?(.+)-\d+)(?:\.(.*))?$")
_UNPLACED = re.compile(rf"/?{re.escape(MODULE_MARK)}\?[^/():;]*")


def class_name(cls: type) -> str:
    """Return a class's name as scopes can hold it."""
    return path_text([cls.__name__]).replace(".", "_")


def token(cls: type, number: int) -> str:
    """Return the provisional path of a copy."""
    return f"?{class_name(cls)}-{number}"


def is_token(path: str) -> bool:
    """Whether a path is that of a copy, or inside one."""
    return path.startswith("?")


def find_places(jaxpr: Jaxpr, leaves: Mapping[Var, str], places: Places) -> dict[str, str]:
    """Return where the copies belong that equations of a program name.

    Args:
        jaxpr: the program; those it calls are looked at when they are entered.
        leaves: by input of the program, the path of the leaf it is.
        places: where modules of each class can be.
    """
    votes: dict[str, set[str]] = {}
    leaves = dict(leaves)
    for eqn in jaxpr.eqns:
        read = [leaves[a] for a in eqn.invars if not isinstance(a, Literal) and a in leaves]
        if read and eqn.primitive.name == "convert_element_type":
            leaves[eqn.outvars[0]] = read[0]
        for match in filter(None, map(_TOKEN.match, modules_of(name_stack(eqn)) if read else ())):
            name, cls, inner = match.groups()
            votes.setdefault(name, set()).update(
                place for place in places.get(cls, ()) for path in read if _has(place, inner, path)
            )
    # A leaf that several modules share goes by its path in the first of them.
    order = {place: n for found in places.values() for n, place in enumerate(found)}
    return {name: max(found, key=order.__getitem__) for name, found in votes.items() if found}


def _has(place: str, inner: str | None, leaf: str) -> bool:
    return leaf.startswith(".".join(filter(None, (place, inner))) + ".")


def rename_copies(scopes: str, found: Mapping[str, str]) -> str:
    """Return a name stack with copies under the paths of their modules, and without the others."""
    for name, place in found.items():
        scopes = re.sub(
            rf"{re.escape(MODULE_MARK + name)}(?=[./():;]|$)", MODULE_MARK + place, scopes
        )
    return _UNPLACED.sub("", scopes).strip("/")
