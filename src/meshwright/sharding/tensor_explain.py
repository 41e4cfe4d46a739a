"""Finding the reason for each tensor-parallel choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshwright.program.dims import DimClasses, DimFactor, LeafDims
from meshwright.sharding.reasons import Reason
from meshwright.sharding.tensor_candidates import Candidate
from meshwright.sharding.tensor_reasons import (
    Column,
    DividedAnotherWay,
    Experts,
    Factor,
    FactorName,
    Factors,
    Follows,
    Fused,
    InsideHeads,
    Joined,
    NeededWhole,
    NoDims,
    NoProduct,
    NotDivisible,
    Obstacle,
    OtherBlock,
    PoorSubstitute,
    Recurrent,
    Replicated,
    Row,
    TensorRole,
    Vocabulary,
)

Rejection = tuple[Candidate, Candidate | None]
"""A rejected candidate and the rival that ruled it out, if any."""

_JOINED: Mapping[str, Joined] = {
    "contract": "contracted",
    "reduce": "reduced",
    "gather": "gathered",
}
"""How the parts of a divided dim are joined, by kind of event; the first that occurs counts."""


def factors_of(classes: DimClasses, dim: Iterable[DimFactor]) -> Factors:
    """Return the factors of a dim, each named once; a factor after heads is the size of a head."""
    factors = list[Factor]()
    for atom in dim:
        factor = Factor(atom.size, _name(classes, atom))
        named = factor in factors or any(other.name == "heads" for other in factors)
        factors.append(Factor(atom.size) if named else factor)
    return tuple(factors)


def why_placed(
    classes: DimClasses, leaf: LeafDims, dim: int, role: TensorRole, candidate: Candidate
) -> Reason:
    """Return the reason for dividing a dim: its role, and where its parts are joined."""
    factors = factors_of(classes, leaf.dims[dim])
    match role:
        case "follows":
            return Follows(_first_kernel(candidate, leaf), factors)
        case "vocabulary":
            return Vocabulary(factors)
        case "row":
            first = _first_kernel(candidate)
            return Row(factors, first if first != leaf.path else None)
        case "expert":
            return Experts(factors)
        case "column" | "replicated":
            return _column(factors, candidate)


def why_replicated(
    classes: DimClasses, leaf: LeafDims, rejections: Sequence[Rejection], size: int
) -> Replicated:
    """Return why a leaf is replicated: what rules out the cheapest way to divide it."""
    if not any(leaf.dims):
        return Replicated(NoDims())
    if not rejections:
        return Replicated(NoProduct())
    candidate, rival = cheapest(rejections)
    if candidate.obstacle:
        return Replicated(_obstacle(classes, leaf, candidate, size))
    return Replicated(_rival(classes, candidate, rival, size))


def cheapest(rejections: Sequence[Rejection]) -> Rejection:
    """Return the rejection to report: of the cheapest candidate that seemed possible."""
    return min(rejections, key=lambda r: (r[0].obstacle in ("blocked", "attention"), r[0].cost))


def fused_factor(leaf: LeafDims, candidate: Candidate) -> tuple[int, tuple[int, ...], int] | None:
    """Return a dim, its factors and the one to divide, if that is not the first; else None."""
    for position, dim in enumerate(leaf.dims):
        index = next((i for i, atom in enumerate(dim) if atom.id in candidate.ways), 0)
        if index > 0:
            return position, tuple(atom.size for atom in dim), index
    return None


def _name(classes: DimClasses, atom: DimFactor) -> FactorName:
    if atom.id in classes.heads:
        return "heads"
    if atom.id in classes.channels:
        return "channels"
    return "vocabulary" if atom.id in classes.vocabularies else ""


def _obstacle(classes: DimClasses, leaf: LeafDims, candidate: Candidate, size: int) -> Obstacle:
    """Return why a candidate can never be used."""
    factors = factors_of(classes, candidate.atoms)
    match candidate.obstacle:
        case "size":
            return NotDivisible(factors, size)
        case "recurrent":
            return Recurrent(_recurrent_leaf(candidate, leaf))
        case "inside":
            owner, dim = _owner(candidate, leaf)
            path = None if owner is leaf else owner.path
            return Fused(factors, factors_of(classes, dim), path)
        case "attention":
            return InsideHeads(factors)
        case "blocked":
            event = next(e for e in classes.events_of(candidate.ways) if e.kind == "block")
            return NeededWhole(factors, event.primitive, event.path)
        case "":
            raise AssertionError("the candidate has no obstacle")


def _rival(
    classes: DimClasses, candidate: Candidate, rival: Candidate | None, size: int
) -> Obstacle:
    """Return why a candidate that could be used was rejected."""
    factors = factors_of(classes, candidate.atoms)
    if rival is None:
        return OtherBlock(factors)
    if not rival.obstacle:
        return DividedAnotherWay(factors, _first_kernel(rival))
    first = classes.leaves[min(rival.kernels)]
    ratio = candidate.cost / max(1, rival.cost)
    return PoorSubstitute(_obstacle(classes, first, rival, size), factors, ratio)


def _recurrent_leaf(candidate: Candidate, leaf: LeafDims) -> str | None:
    """Return the leaf two of whose dims are one class: None for this leaf, else a path."""

    def count(owner: LeafDims) -> int:
        return sum(any(atom.id in candidate.ways for atom in dim) for dim in owner.dims)

    if count(leaf) > 1:
        return None
    owners = (candidate.classes.leaves[i] for i in candidate.touched)
    return next(owner.path for owner in owners if count(owner) > 1)


def _owner(candidate: Candidate, leaf: LeafDims) -> tuple[LeafDims, tuple[DimFactor, ...]]:
    """Return a leaf, this one if possible, and its dim that contains the candidate."""
    kernels_first = sorted(candidate.touched, key=lambda i: i not in candidate.kernels)
    for owner in (leaf, *(candidate.classes.leaves[i] for i in kernels_first)):
        fused = fused_factor(owner, candidate)
        if fused is not None:
            return owner, owner.dims[fused[0]]
    raise AssertionError("the candidate is inside no dim")


def _first_kernel(candidate: Candidate, beside: LeafDims | None = None) -> str:
    """Return a kernel that the candidate divides: of the same module if possible, else a column."""
    placed = [i for i in candidate.placed if i in candidate.kernels]
    columns = [i for i in placed if not _is_row(candidate, i)]
    paths = [candidate.classes.leaves[i].path for i in columns or placed]
    module = beside.path.rpartition(".")[0] if beside is not None else None
    return next((path for path in paths if path.rpartition(".")[0] == module), paths[0])


def _is_row(candidate: Candidate, position: int) -> bool:
    rows = candidate.classes.leaves[position].uses.get("row", frozenset())
    return bool(rows & candidate.ways.keys())


def _column(factors: Factors, candidate: Candidate) -> Column:
    first = {event.kind: event for event in reversed(candidate.classes.events_of(candidate.ways))}
    for kind, joined in _JOINED.items():
        if kind in first:
            return Column(factors, joined, first[kind].path)
    return Column(factors, "", "")
