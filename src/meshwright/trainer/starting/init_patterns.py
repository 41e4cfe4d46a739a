"""Which parameters of another run a run starts from, and under which names: `init_patterns`."""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.names import matches
from meshwright.weights.hf_folder import listed

_KEY = "model.init_patterns"
_WILDCARD = re.compile(r"(\*\*|\*)")

Shapes = Mapping[str, Sequence[int]]


def renamed(saved: Mapping[str, Any], patterns: Sequence[str] | None) -> dict[str, Any]:
    """Return saved values by the names that patterns such as ``**:encoder.**`` give them."""
    names = {path: path for path in saved}
    for pattern in patterns or ():
        names |= _renames(pattern, saved.keys())
    found = {names[path]: value for path, value in saved.items()}
    if len(found) < len(saved):
        raise UserError(f"{Setting(_KEY)} gives several parameters of the run one name")
    return found


def chosen(saved: Set[str], model: Set[str], patterns: Sequence[str] | None, run: Any) -> set[str]:
    """Return the paths that patterns choose, or all: of a model, of a run, or as renamed."""
    paths = {*saved, *model}
    found: set[str] = paths if patterns is None else set()
    for pattern in patterns or ():
        matched = {path for path in paths if matches(pattern, path)}
        matched |= set(_renames(pattern, saved).values())
        if not matched:
            raise UserError(
                f"the pattern `{pattern}` matches no parameter",
                why=f"neither the model nor {run} has one; there are {listed(sorted(paths))}",
            )
        found |= matched
    return found


def proposal(have: Shapes, need: Shapes, model: Shapes) -> str:
    """Return which patterns would fit what is saved and chosen to what is chosen of the model."""
    patterns = _wrapping(have, model) or _fitting(have, need)
    if not patterns:
        return "no parameter has the same name and shape in both; start from random values"
    shown = listed(patterns, quote='"')
    return (
        f"take only what fits, with {Setting(_KEY)} such as [{shown}]; "
        '"blocks.**:encoder.blocks.**" takes parameters under another name'
    )


def _wrapping(have: Shapes, model: Shapes) -> list[str]:
    """Return the pattern of a model that holds the saved one as a part."""
    first = min(have, default="")
    prefixes = [path.removesuffix(first) for path in model if first and path.endswith(f".{first}")]
    fits = (all(_same(s, model.get(p + n)) for n, s in have.items()) for p in prefixes)
    return [f"**:{prefix}**" for prefix, fit in zip(prefixes, fits, strict=True) if fit][:1]


def _fitting(have: Shapes, need: Shapes) -> list[str]:
    """Return patterns that match nothing but what is the same in both."""
    fit = {path for path in have if _same(have[path], need.get(path))}
    others = {*have, *need} - fit
    found: dict[str, None] = {}
    for path in sorted(fit):
        wide = f"{path.split('.')[0]}.**", re.sub(r"\b\d+\b", "*", path)
        fitting = (p for p in wide if matches(p, path) and not any(matches(p, o) for o in others))
        found[next(fitting, path)] = None
    return list(found)


def _same(shape: Sequence[int], other: Sequence[int] | None) -> bool:
    return other is not None and tuple(shape) == tuple(other)


def _renames(pattern: str, saved: Set[str]) -> dict[str, str]:
    """Return new names by old ones; empty for a pattern that renames nothing."""
    source, _, target = pattern.partition(":")
    if not target:
        return {}
    if _WILDCARD.findall(source) != _WILDCARD.findall(target):
        raise UserError(
            f"`{pattern}` has other wildcards on its two sides",
            why="what a * or ** stands for in the run's path is put in its place in the model's",
            fix='write them in the same order on both, such as "blocks.*.mlp.**:layers.*.ffn.**"',
        )
    groups = {"**": "(.*)", "*": "([^.]*)"}
    old = "".join(groups.get(part) or re.escape(part) for part in _WILDCARD.split(source))
    found = {path: re.fullmatch(old, path) for path in saved}
    parts = {path: iter(match.groups()) for path, match in found.items() if match}
    return {p: _WILDCARD.sub(lambda _, own=own: next(own), target) for p, own in parts.items()}
