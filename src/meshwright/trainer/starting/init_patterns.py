"""Which parameters of another run a run starts from, and under which names: `init_patterns`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from meshwright.errors import Setting, UserError
from meshwright.sharding.rules import matches
from meshwright.weights.hf_folder import listed

_KEY = "model.init_patterns"
_MOST = 5
"""How many patterns are proposed."""

Shapes = Mapping[str, Sequence[int]]


def renamed(saved: Mapping[str, Any], patterns: Sequence[str] | None) -> dict[str, Any]:
    """Return saved values by the names that patterns such as ``**:encoder.**`` give them."""
    names = {path: path for path in saved}
    for pattern in patterns or ():
        names |= _renames(pattern, saved)
    found = {names[path]: value for path, value in saved.items()}
    if len(found) < len(saved):
        new = list(names.values())
        twice = listed(sorted({path for path in new if new.count(path) > 1}))
        raise UserError(
            f"{Setting(_KEY)} gives several parameters of the run one name",
            why=f"{twice} would be taken from more than one",
        )
    return found


def chosen(saved: Set[str], model: Set[str], patterns: Sequence[str] | None, run: Any) -> set[str]:
    """Return the paths that patterns choose: of the model, of what is saved, or as renamed.

    Args:
        saved: paths in the run, before any renaming.
        model: paths of the model's weights.
        patterns: the patterns; None chooses all.
        run: the run.
    """
    paths = {*saved, *model}
    if patterns is None:
        return paths
    found: set[str] = set()
    for pattern in patterns:
        matched = set(_renames(pattern, saved).values()) or {
            p for p in paths if matches(pattern, p)
        }
        if not matched:
            raise UserError(
                f"the pattern `{pattern}` matches no parameter",
                why=f"neither the model nor {run} has one; there are {listed(sorted(paths))}",
            )
        found |= matched
    return found


def proposal(have: Shapes, need: Shapes, model: Shapes) -> str:
    """Return which patterns would fit, for a message.

    Args:
        have: shapes of what is saved, as far as it is chosen.
        need: shapes of what is chosen of the model.
        model: shapes of all leaves of the model.
    """
    if not (patterns := _wrapping(have, model) or _fitting(have, need)):
        return "no parameter has the same name and shape in both; start from random values"
    shown = ", ".join(f'"{pattern}"' for pattern in patterns[:_MOST])
    more = ", …" if len(patterns) > _MOST else ""
    return (
        f"take only what fits, with {Setting(_KEY)} such as [{shown}{more}]; "
        '"blocks.**:encoder.blocks.**" takes parameters under another name'
    )


def _wrapping(have: Shapes, model: Shapes) -> list[str]:
    """Return the pattern of a model that holds the saved one as a part."""
    first = min(have, default="")
    prefixes = [path.removesuffix(first) for path in model if path.endswith(f".{first}")]
    for prefix in prefixes if first else ():
        if all(tuple(model.get(prefix + p, ())) == tuple(shape) for p, shape in have.items()):
            return [f"**:{prefix}**"]
    return []


def _fitting(have: Shapes, need: Shapes) -> list[str]:
    """Return patterns that match nothing but what is the same in both."""
    paths = {*have, *need}
    fit = {p for p in have.keys() & need.keys() if tuple(have[p]) == tuple(need[p])}
    found: dict[str, None] = {}
    for path in sorted(fit):
        first, starred = path.split(".")[0], re.sub(r"\b\d+\b", "*", path)
        for pattern in (f"{first}.**", starred, path):
            if all(other in fit for other in paths if matches(pattern, other)):
                found[pattern if matches(pattern, path) else path] = None
                break
    return list(found)


def _renames(pattern: str, saved: Set[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return new names by old ones; empty for a pattern that renames nothing."""
    source, _, target = pattern.partition(":")
    if not target:
        return {}
    wild = r"(\*\*|\*)"
    old, new = re.split(wild, source), re.split(wild, target)
    if old[1::2] != new[1::2]:
        raise UserError(
            f"`{pattern}` has other wildcards on its two sides",
            why="what a * or ** stands for in the run's path is put in its place in the model's",
            fix='write them in the same order on both, such as "blocks.*.mlp.**:layers.*.ffn.**"',
        )
    groups = {"**": "(.*)", "*": "([^.]*)"}
    compiled = re.compile("".join(groups.get(part) or re.escape(part) for part in old))
    renames: dict[str, str] = {}
    for path in saved:
        if found := compiled.fullmatch(path):
            parts = iter(found.groups())
            renames[path] = "".join(next(parts) if part in groups else part for part in new)
    return renames
