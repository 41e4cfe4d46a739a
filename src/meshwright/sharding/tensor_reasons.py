"""The reasons given for a tensor-parallel choice, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.program.dims import Atom, DimClasses, LeafDims
from meshwright.sharding.tensor_candidates import Candidate

Refusal = tuple[Candidate, Candidate | None]
"""A refused candidate and the one that stood in its way, if any."""


def describe_dim(classes: DimClasses, dim: Iterable[Atom]) -> str:
    """Write a dim as the product of its factors: ``8 heads × 16``."""
    words = list[str]()
    for atom in dim:
        name = _name(classes, atom)
        named = name in words or any(word.endswith(" heads") for word in words)
        words.append(str(atom.size) if named else name)
    return " × ".join(words)


def why_placed(
    classes: DimClasses, leaf: LeafDims, dim: int, role: str, candidate: Candidate
) -> str:
    """Say what a divided dim is, and where its parts meet again."""
    text = describe_dim(classes, leaf.dims[dim])
    match role:
        case "follows":
            return f"follows {_first_kernel(candidate, leaf)}, whose {text} it shares"
        case "vocabulary":
            return f"vocabulary: each device looks up its part of {text}"
        case "row":
            return f"row: contracts {text}, {_fed_by(candidate, leaf)}"
        case "expert":
            return f"expert: {text} kernels side by side"
        case _:
            return f"column: feeds {text}, {_meeting_place(candidate)}"


def why_replicated(
    classes: DimClasses, leaf: LeafDims, refusals: Sequence[Refusal], size: int
) -> str:
    """Say why a leaf is held whole by every device, by the cheapest way to divide it."""
    if not any(leaf.dims):
        return "replicated: nothing to divide"
    if not refusals:
        return "replicated: no matrix product or lookup of data to divide"
    candidate, rival = cheapest(refusals)
    obstacle = _obstacle_text(classes, leaf, candidate, size)
    return f"replicated: {obstacle or _rival_text(classes, candidate, rival, size)}"


def cheapest(refusals: Sequence[Refusal]) -> Refusal:
    """Return the refusal to give as the reason: the least costly way that looked possible."""
    return min(refusals, key=lambda r: (r[0].obstacle in ("blocked", "attention"), r[0].cost))


def fused_factor(leaf: LeafDims, candidate: Candidate) -> tuple[int, tuple[int, ...], int] | None:
    """Return the dim, its factors and the one to divide, where that one sits inside the dim."""
    for position, dim in enumerate(leaf.dims):
        index = next((i for i, atom in enumerate(dim) if atom.id in candidate.ways), 0)
        if index > 0:
            return position, tuple(atom.size for atom in dim), index
    return None


def _name(classes: DimClasses, atom: Atom) -> str:
    if atom.id in classes.heads:
        return f"{atom.size} heads"
    if atom.id in classes.channels:
        return f"{atom.size} channels"
    if atom.id in classes.vocabularies:
        return f"vocabulary {atom.size}"
    return str(atom.size)


def _obstacle_text(classes: DimClasses, leaf: LeafDims, candidate: Candidate, size: int) -> str:
    text = describe_dim(classes, candidate.atoms)
    match candidate.obstacle:
        case "size":
            verb = "do" if text.endswith("s") else "does"
            return f"{text} {verb} not divide by tensor={size}"
        case "recurrent":
            return f"both dims{_recurrent_leaf(candidate, leaf)} are one class (recurrent)"
        case "inside":
            owner, dim = _owner(candidate, leaf)
            whose = "its dim" if owner is leaf else f"a dim of {owner.path}"
            return (
                f"fused, the factor of {text} lies inside {whose} "
                f"({describe_dim(classes, dim)}) and no PartitionSpec can express that"
            )
        case "attention":
            return f"attention contracts {text} within each head"
        case "blocked":
            event = next(e for e in classes.events_of(candidate.ways) if e.kind == "block")
            return f"{event.primitive}{_in(event.path)} needs all of {text}"
        case _:
            return ""


def _rival_text(
    classes: DimClasses, candidate: Candidate, rival: Candidate | None, size: int
) -> str:
    text = describe_dim(classes, candidate.atoms)
    if rival is None:
        return f"another block could not be divided by {text}"
    if not rival.obstacle:
        other = _first_kernel(rival)
        return f"kernels with this dim ({text}) are divided another way, such as {other}"
    first = classes.leaves[min(rival.kernels)]
    instead = candidate.cost / max(1, rival.cost)
    return (
        f"{_obstacle_text(classes, first, rival, size)}, "
        f"and {text} instead would send {instead:.1f} times the bytes"
    )


def _recurrent_leaf(candidate: Candidate, leaf: LeafDims) -> str:
    """Return whose dims are one class: nothing if this leaf's, else the first such leaf's."""

    def count(owner: LeafDims) -> int:
        return sum(any(atom.id in candidate.ways for atom in dim) for dim in owner.dims)

    if count(leaf) > 1:
        return ""
    owners = (candidate.classes.leaves[i] for i in candidate.touched)
    return next(f" of {owner.path}" for owner in owners if count(owner) > 1)


def _owner(candidate: Candidate, leaf: LeafDims) -> tuple[LeafDims, tuple[Atom, ...]]:
    """Return a leaf, this one if possible, and its dim that has the candidate inside."""
    kernels_first = sorted(candidate.touched, key=lambda i: i not in candidate.kernels)
    for owner in (leaf, *(candidate.classes.leaves[i] for i in kernels_first)):
        found = fused_factor(owner, candidate)
        if found is not None:
            return owner, owner.dims[found[0]]
    raise AssertionError("the candidate is inside no dim")


def _first_kernel(candidate: Candidate, beside: LeafDims | None = None) -> str:
    """Return a kernel the candidate divides: beside a leaf if there is one, else a column."""
    placed = [i for i in candidate.placed if i in candidate.kernels]
    columns = [i for i in placed if not _is_row(candidate, i)]
    paths = [candidate.classes.leaves[i].path for i in columns or placed]
    module = beside.path.rpartition(".")[0] if beside is not None else None
    return next((path for path in paths if path.rpartition(".")[0] == module), paths[0])


def _is_row(candidate: Candidate, position: int) -> bool:
    rows = candidate.classes.leaves[position].uses.get("row", frozenset())
    return bool(rows & candidate.ways.keys())


def _fed_by(candidate: Candidate, leaf: LeafDims) -> str:
    first = _first_kernel(candidate)
    return f"fed by {first}" if first != leaf.path else "summed over the devices"


def _meeting_place(candidate: Candidate) -> str:
    events = candidate.classes.events_of(candidate.ways)
    for kind, verb in (("contract", "contracted"), ("reduce", "reduced"), ("gather", "gathered")):
        found = next((event for event in events if event.kind == kind), None)
        if found is not None:
            return verb + (_in(found.path) or " in the loss")
    return "never summed"


def _in(path: str) -> str:
    return f" in {path}" if path else ""
