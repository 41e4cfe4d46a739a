"""Placements from the user's sharding rules and from annotations in the model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import Setting, Spelling, UserError, current_spelling, did_you_mean
from meshwright.mesh.axes import canonical_axis, entry_names
from meshwright.program.dims.classes import DimClasses, Roles
from meshwright.program.jaxpr.names import matches
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.placement import BY_ANNOTATION, Placement, Reason

Rule = str | Sequence[Any]
"""``column``, ``row``, ``replicate``, or a partition spec such as ``["fsdp", "tensor"]``."""

TENSOR_ROLES = ("column", "row")
"""Rules for the tensor axis alone; fsdp still shards another dim."""


def find_rule(
    rules: Mapping[str, Rule], step: StepLeaf, paths: Sequence[str], *, stages: int = 1
) -> tuple[str, Rule] | None:
    """Return the last rule whose pattern matches one of the leaves a step leaf holds.

    With several stages, blocks are always rolled.
    """
    last_match = None
    for pattern, rule in rules.items():
        is_match = [matches(pattern, paths[source]) for source in step.sources]
        if any(is_match) and not all(is_match):
            staged = f"with pipe={stages} a stage holds its blocks as one array"
            raise UserError(
                f"the sharding rule `{pattern}` names only some blocks of `{step.leaf.path}`",
                why=f"{staged if stages > 1 else 'rolled blocks are one array'}, "
                f"which is placed as a whole; the rule names {sum(is_match)} of {len(is_match)}",
                fix=f"write `{step.leaf.path}`"
                + ("" if stages > 1 else f", or {Setting('sharding.blocks', 'unroll')}"),
            )
        if any(is_match):
            last_match = (pattern, rule)
    return last_match


MOST_PATHS = 12
"""How many paths a message lists at most."""


def check_rules(rules: Mapping[str, Rule], paths: Sequence[str]) -> None:
    """Refuse a rule that matches no parameter."""
    for pattern in rules:
        if not any(matches(pattern, path) for path in paths):
            raise UserError(
                f"the sharding rule `{pattern}` matches no parameter",
                why=f"the model has {len(paths)} parameters, such as `{paths[0]}`",
                fix=did_you_mean(pattern, paths) or _where_listed(paths),
            )


def _where_listed(paths: Sequence[str]) -> str:
    if current_spelling() is Spelling.COMMAND_LINE:
        return "`meshwright inspect` lists every parameter's path"
    more = "" if len(paths) <= MOST_PATHS else ", …"
    return f"write one of {', '.join(paths[:MOST_PATHS])}{more}, or a pattern"


def apply_rule(
    pattern: str, rule: Rule, step: StepLeaf, classes: DimClasses, sizes: Mapping[str, int]
) -> Placement:
    """Return the placement a rule asks for."""
    leaf = step.leaf
    reason = by_rule(pattern, rule)
    if rule == "replicate":
        return Placement(leaf.path, ((),) * len(leaf.shape), (reason,))
    if rule in TENSOR_ROLES:
        chosen = _role_dim(str(rule), step, classes.roles_of(leaf.path), sizes.get("tensor", 1))
        dims = tuple(("tensor",) if d == chosen else () for d in range(len(leaf.shape)))
        return _checked(Placement(leaf.path, dims, (reason,)), leaf.shape, sizes)
    if isinstance(rule, str):
        raise UserError(
            f"there is no sharding rule `{rule}` (for `{pattern}`)",
            fix='write column, row, replicate, or a spec such as ["fsdp", "tensor"]',
        )
    # A rule describes the leaf of one block; a stack has one more leading dim.
    entries = [None, *rule] if step.stacked else rule
    return _explicit(leaf, entries, reason, sizes)


def by_rule(pattern: str, rule: Rule) -> Reason:
    """Return the reason for a placement that a rule of the user asks for."""
    return Reason(f"rule `{pattern}`: {rule if isinstance(rule, str) else list(rule)}")


def check_on_stages(step: StepLeaf, spec: Sequence[Any], reason: Reason, stages: int) -> None:
    """Refuse a spec that shards blocks over the stages a second time."""
    without_pipe = [[n for n in entry_names(e) if canonical_axis(n) != "pipe"] for e in spec]
    if stages == 1 or sum(map(len, without_pipe)) == sum(len(entry_names(e)) for e in spec):
        return
    blocks = len(step.sources) if step.stacked else step.leaf.shape[0]
    entries = [
        (e[0] if len(e) == 1 else f"[{', '.join(e)}]") if e else "null" for e in without_pipe
    ]
    raise UserError(
        f"`{step.leaf.path}` cannot be sharded over `pipe` a second time",
        why=f"{reason}; its {blocks} blocks are already sharded over pipe={stages}",
        fix=f"leave `pipe` out: [{', '.join(entries)}]",
    )


def _role_dim(rule: str, step: StepLeaf, roles: Roles, size: int) -> int | None:
    """Return the dim with this role; a divisible one if there are several."""
    wanted, other = (roles.column, roles.row) if rule == "column" else (roles.row, roles.column)
    shape = step.leaf.shape
    if not wanted and not other:
        # A bias takes part in no matrix product; its last dim is the column.
        last = len(shape) - 1
        return last if rule == "column" and last >= int(step.stacked) else None
    candidates = [d for d in wanted if d not in other]
    if not candidates:
        # A square kernel between equal dims: the output dim is the last.
        candidates = list(wanted if rule == "row" else reversed(wanted))
    return next((d for d in candidates if shape[d] % size == 0), next(iter(candidates), None))


def annotated(leaf: Leaf, sizes: Mapping[str, int]) -> Placement:
    """Return the placement of a parameter that is annotated in the model."""
    return _explicit(leaf, leaf.annotation or (), BY_ANNOTATION, sizes)


def _explicit(
    leaf: Leaf, spec: Sequence[Any], reason: Reason, sizes: Mapping[str, int]
) -> Placement:
    rank = len(leaf.shape)
    if len(spec) > rank:
        raise UserError(
            f"the partition spec of `{leaf.path}` has {len(spec)} entries",
            why=f"{reason}; the parameter has {rank} dims",
            fix="write one entry per dim, and null for a dim that is not sharded",
        )
    entries = [*spec, *([None] * (rank - len(spec)))]
    dims = tuple(tuple(canonical_axis(name) for name in entry_names(e)) for e in entries)
    axes = [axis for dim in dims for axis in dim]
    if len(set(axes)) < len(axes):
        raise UserError(
            f"the partition spec of `{leaf.path}` names an axis twice",
            why=str(reason),
            fix="name each axis once: it can shard only one dim",
        )
    return _checked(Placement(leaf.path, dims, (reason,)), leaf.shape, sizes)


def _checked(placement: Placement, shape: Sequence[int], sizes: Mapping[str, int]) -> Placement:
    for number, (axes, size) in enumerate(zip(placement.dims, shape, strict=True)):
        parts = math.prod(sizes.get(axis, 1) for axis in axes)
        if size % parts:
            raise UserError(
                f"`{placement.path}` cannot be sharded like this",
                why=f"{placement.reason}; dim {number} has size {size}, which {parts} parts "
                f"({' × '.join(f'{a}={sizes.get(a, 1)}' for a in axes)}) do not divide",
            )
    dims = tuple(tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in placement.dims)
    return Placement(placement.path, dims, placement.reasons)
