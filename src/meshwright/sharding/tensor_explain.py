"""Finding the reason for each tensor-parallel choice."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from meshwright.program.dims.classes import DimClasses, LeafDims
from meshwright.program.dims.factors import DimFactor
from meshwright.sharding.tensor_candidates import Candidate, dims_with

TensorRole = Literal["column", "row", "vocabulary", "expert", "follows", "replicated"]
"""The role of the dim that the tensor axis shards."""

Rejection = tuple[Candidate, Candidate | None]
"""A rejected candidate and the rival that ruled it out, if any."""

_JOINED: Mapping[str, str] = {"contract": "contracted", "reduce": "reduced", "gather": "gathered"}
"""How the parts of a sharded dim are joined, by kind of event; the first that occurs counts."""


def product_of(classes: DimClasses, dim: Iterable[DimFactor]) -> str:
    """Return a dim as the product of its factors: ``8 heads × 16``.

    Each kind of factor is named once, and a factor after heads is the size of a head.
    """
    factors: list[str] = []
    for factor in dim:
        named = _named(classes, factor)
        known = named in factors or any(other.endswith(" heads") for other in factors)
        factors.append(str(factor.size) if known else named)
    return " × ".join(factors)


def why_placed(
    classes: DimClasses, leaf: LeafDims, dim: int, role: TensorRole, candidate: Candidate
) -> str:
    """Return the reason for sharding a dim: its role, and where its parts are joined."""
    factors = product_of(classes, leaf.dims[dim])
    match role:
        case "follows":
            return f"follows {_first_kernel(candidate, leaf)}, whose {factors} it shares"
        case "vocabulary":
            return f"vocabulary: each device looks up its part of {factors}"
        case "row":
            first = _first_kernel(candidate)
            source = "summed over the devices" if first == leaf.path else f"fed by {first}"
            return f"row: contracts {factors}, {source}"
        case "expert":
            return f"expert: {factors} kernels side by side"
        case "column" | "replicated":
            return f"column: feeds {factors}, {_where_joined(candidate)}"


def why_whole(
    classes: DimClasses, leaf: LeafDims, rejections: Sequence[Rejection], size: int
) -> str:
    """Return why every device holds a leaf whole: what rules out the cheapest way to shard it."""
    if not any(leaf.dims):
        return "nothing to shard"
    if not rejections:
        return "no matrix product or lookup of data to shard"
    # Of what seemed possible, the cheapest candidate is the one to report.
    candidate, rival = min(
        rejections, key=lambda r: (r[0].obstacle in ("blocked", "attention"), r[0].cost)
    )
    if candidate.obstacle:
        return _obstacle(classes, leaf, candidate, size)
    return _rival(classes, candidate, rival, size)


def _named(classes: DimClasses, factor: DimFactor) -> str:
    if factor.id in classes.heads:
        return f"{factor.size} heads"
    if factor.id in classes.channels:
        return f"{factor.size} channels"
    return f"vocabulary {factor.size}" if factor.id in classes.vocabularies else str(factor.size)


def _obstacle(classes: DimClasses, leaf: LeafDims, candidate: Candidate, size: int) -> str:
    """Return why a candidate can never be used."""
    factors = product_of(classes, candidate.factors)
    match candidate.obstacle:
        case "size":
            verb = "are" if factors.endswith((" heads", " channels")) else "is"
            return f"{factors} {verb} not divisible by tensor={size}"
        case "recurrent":
            owner = _recurrent_leaf(candidate, leaf)
            whose = f" of {owner}" if owner else ""
            return f"both dims{whose} are the same class (recurrent or residual)"
        case "inside":
            owner, dim = _owner(candidate, leaf)
            whose = "its dim" if owner is leaf else f"a dim of {owner.path}"
            return (
                f"fused: the factor {factors} is inside {whose} ({product_of(classes, dim)}), "
                "which no PartitionSpec can express"
            )
        case "attention":
            return f"attention contracts {factors} within each head"
        case "blocked":
            event = next(e for e in classes.events_of(candidate.splits) if e.kind == "block")
            where = f" in {event.path}" if event.path else ""
            return f"{event.primitive}{where} needs all of {factors}"
        case "":
            raise AssertionError("the candidate has no obstacle")


def _rival(classes: DimClasses, candidate: Candidate, rival: Candidate | None, size: int) -> str:
    """Return why a candidate that could be used was rejected."""
    factors = product_of(classes, candidate.factors)
    if rival is None:
        # Repeated blocks are sharded alike.
        return f"another block cannot be sharded along {factors}"
    if not rival.obstacle:
        first = _first_kernel(rival)
        return f"kernels with this dim ({factors}) are sharded another way, such as {first}"
    better = _obstacle(classes, classes.leaves[min(rival.kernels)], rival, size)
    ratio = candidate.cost / max(1, rival.cost)
    return f"{better}, and {factors} instead would send {ratio:.1f} times the bytes"


def _recurrent_leaf(candidate: Candidate, leaf: LeafDims) -> str | None:
    """Return the leaf two of whose dims are one class: None for this leaf, else a path."""
    if len(dims_with(leaf, candidate.splits)) > 1:
        return None
    owners = (candidate.classes.leaves[i] for i in candidate.touched)
    return next(owner.path for owner in owners if len(dims_with(owner, candidate.splits)) > 1)


def _owner(candidate: Candidate, leaf: LeafDims) -> tuple[LeafDims, tuple[DimFactor, ...]]:
    """Return a leaf, this one if possible, and its dim that contains the candidate."""
    kernels_first = sorted(candidate.touched, key=lambda i: i not in candidate.kernels)
    for owner in (leaf, *(candidate.classes.leaves[i] for i in kernels_first)):
        for dim in owner.dims:
            split = [factor.id in candidate.splits for factor in dim]
            if any(split) and not split[0]:
                return owner, dim
    raise AssertionError("the candidate is inside no dim")


def _first_kernel(candidate: Candidate, beside: LeafDims | None = None) -> str:
    """Return a kernel that the candidate shards: of the same module if possible, else a column."""
    placed = [i for i in candidate.placed if i in candidate.kernels]
    columns = [i for i in placed if not _is_row(candidate, i)]
    paths = [candidate.classes.leaves[i].path for i in columns or placed]
    module = beside.path.rpartition(".")[0] if beside is not None else None
    return next((path for path in paths if path.rpartition(".")[0] == module), paths[0])


def _is_row(candidate: Candidate, position: int) -> bool:
    rows = candidate.classes.leaves[position].uses.get("row", frozenset())
    return bool(rows & candidate.splits.keys())


def _where_joined(candidate: Candidate) -> str:
    first = {event.kind: event for event in reversed(candidate.classes.events_of(candidate.splits))}
    for kind, joined in _JOINED.items():
        if kind in first:
            return f"{joined} in {first[kind].path or 'the loss'}"
    return "never summed"
