"""Rules: what a user says about where parameters live, by path pattern or by logical axis."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import UserError, did_you_mean
from meshwright.mesh.axes import AXES, canonical_axis
from meshwright.program.dims import DimClasses
from meshwright.program.layout import StepLeaf
from meshwright.sharding.placement import DimAxes, Placement

Rule = str | Sequence[Any]
"""``column``, ``row``, ``replicate``, or a partition spec such as ``["fsdp", "tensor"]``."""


def find_rule(
    rules: Mapping[str, Rule], step: StepLeaf, paths: Sequence[str]
) -> tuple[str, Rule] | None:
    """Return the last rule whose pattern matches one of the leaves a step leaf holds."""
    found = None
    for pattern, rule in rules.items():
        if any(matches(pattern, paths[source]) for source in step.sources):
            found = (pattern, rule)
    return found


def check_rules(rules: Mapping[str, Rule], paths: Sequence[str]) -> None:
    """Refuse a rule that matches no parameter."""
    for pattern in rules:
        if not any(matches(pattern, path) for path in paths):
            hint = did_you_mean(pattern, paths)
            raise UserError(
                f"the sharding rule `{pattern}` matches no parameter",
                why=f"{len(paths)} parameters, such as `{paths[0]}`",
                fix=hint or "`meshwright inspect` lists every parameter's path",
            )


def matches(pattern: str, path: str) -> bool:
    """Whether a path pattern matches: ``*`` is one part of the path, ``**`` any number."""
    parts = [
        ".*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*")
        for part in pattern.split(".")
    ]
    return re.fullmatch(r"\.".join(parts), path) is not None


def apply_rule(
    pattern: str, rule: Rule, step: StepLeaf, classes: DimClasses, sizes: Mapping[str, int]
) -> Placement:
    """Return the placement a rule asks for."""
    leaf = step.leaf
    because = f"rule `{pattern}`: {rule if isinstance(rule, str) else list(rule)}"
    if rule == "replicate":
        return Placement(leaf.path, ((),) * len(leaf.shape), because)
    if rule in ("column", "row"):
        roles = classes.roles_of(leaf.path)
        candidates = roles.column if rule == "column" else roles.row
        # A bias has no rows and no matrix product of its own: its one dim is the column.
        chosen = candidates[0] if candidates else len(leaf.shape) - 1
        dims: list[DimAxes] = [()] * len(leaf.shape)
        dims[chosen] = ("tensor",)
        return _checked(Placement(leaf.path, tuple(dims), because), leaf.shape, sizes)
    if isinstance(rule, str):
        raise UserError(
            f"the sharding rule `{pattern}: {rule}` is not known",
            fix='write column, row, replicate, or a spec such as ["fsdp", "tensor"]',
        )
    return _checked(explicit(leaf.path, rule, len(leaf.shape), because), leaf.shape, sizes)


def explicit(path: str, spec: Sequence[Any], rank: int, because: str) -> Placement:
    """Return the placement a partition spec writes out; it may be shorter than the dims."""
    if len(spec) > rank:
        raise UserError(
            f"the partition spec of `{path}` has {len(spec)} entries", why=f"it has {rank} dims"
        )
    entries = [*spec, *([None] * (rank - len(spec)))]
    return Placement(path, tuple(_axes(entry) for entry in entries), because)


def _axes(entry: Any) -> DimAxes:
    if entry is None:
        return ()
    names = (entry,) if isinstance(entry, str) else tuple(entry)
    return tuple(canonical_axis(name) for name in names)


def _checked(placement: Placement, shape: Sequence[int], sizes: Mapping[str, int]) -> Placement:
    for number, (axes, size) in enumerate(zip(placement.dims, shape, strict=True)):
        parts = 1
        for axis in axes:
            assert axis in AXES
            parts *= sizes.get(axis, 1)
        if size % parts:
            raise UserError(
                f"`{placement.path}` cannot be divided as asked",
                why=f"{placement.reason}; dim {number} has size {size}, which {parts} parts "
                f"({' × '.join(f'{a}={sizes.get(a, 1)}' for a in axes)}) do not divide",
            )
    present = tuple(tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in placement.dims)
    return Placement(placement.path, present, placement.reason)
