"""Tensor parallelism: which dim of which parameter the tensor axis divides, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import Setting, UserError
from meshwright.program.dims import Atom, DimClasses, LeafDims
from meshwright.sharding.reasons import Reason
from meshwright.sharding.tensor_candidates import (
    Candidate,
    Pattern,
    find_candidates,
    joint,
    ways_along,
)
from meshwright.sharding.tensor_explain import (
    Refusal,
    cheapest,
    fused_factor,
    why_placed,
    why_replicated,
)
from meshwright.sharding.tensor_reasons import Replicated

TensorRole = Literal["column", "row", "vocabulary", "expert", "follows", "replicated"]

SUBSTITUTE_COST = 3
"""A class whose size does not divide is replaced by another one only if that costs at most this
many times its communication; beyond that, replicating the parameter is cheaper."""


@dataclass(frozen=True, slots=True)
class FusedDim:
    """A dim that could be divided if the parameter had its factors as dims of their own.

    Attributes:
        dim: position of the dim in the parameter.
        factors: the sizes it falls into, major first.
        index: the factor to divide.
    """

    dim: int
    factors: tuple[int, ...]
    index: int


@dataclass(frozen=True, slots=True)
class LeafChoice:
    """Which dim of one leaf the tensor axis divides.

    Attributes:
        path: its canonical path.
        dim: the divided dim; None if every device holds the whole leaf.
        role: what the dim is.
        reason: why.
        fused: for a replicated leaf, the factor of a dim that would divide it.
    """

    path: str
    dim: int | None
    role: TensorRole
    reason: Reason
    fused: FusedDim | None = None


@dataclass(frozen=True)
class TensorChoice:
    """How a model is divided over the tensor axis.

    Attributes:
        size: the length of the axis.
        leaves: by canonical path, parameters and other state.
        ways: into how many parts each divided class falls; for activations.
        traffic: bytes each device sends per training step because of it.
    """

    size: int
    leaves: Mapping[str, LeafChoice]
    ways: Mapping[int, int]
    traffic: int

    def dim_of(self, path: str) -> int | None:
        """Return the divided dim of a leaf."""
        return self.leaves[path].dim

    def sharded_dim(self, dims: Sequence[tuple[Atom, ...]]) -> int | None:
        """Return the dim of an activation that lies on the axis; None if none or several would."""
        found = [d for d, dim in enumerate(dims) if ways_along(dim, self.ways) == self.size]
        return found[0] if len(found) == 1 else None


def choose_tensor_dims(classes: DimClasses, tensor_size: int) -> TensorChoice:
    """Choose at most one dim of every leaf for a tensor axis of this size.

    Candidates are taken by communication per parameter byte, cheapest first. The candidates of
    repeated blocks are taken or refused together.
    """
    if tensor_size == 1:
        return TensorChoice(1, {}, {}, 0)
    search = _Search()
    candidates = find_candidates(classes, tensor_size)
    for group in _groups(candidates):
        search.consider(group)
    ways = {name: candidate.ways[name] for name, candidate in search.by_class.items()}
    leaves = {
        leaf.path: _leaf_choice(classes, position, leaf, search, tensor_size)
        for position, leaf in enumerate(classes.leaves)
        if leaf.role != "batch"
    }
    return TensorChoice(tensor_size, leaves, ways, classes.traffic(ways))


def check_tensor_size(classes: DimClasses, choice: TensorChoice) -> None:
    """Raise a `UserError` if the tensor axis is too large for the model to make use of it."""
    if choice.size == 1:
        return
    for leaf in classes.params:
        if leaf.is_kernel and choice.dim_of(leaf.path) is None:
            _check_heads(classes, leaf, choice)
    if all(leaf.dim is None for leaf in choice.leaves.values()):
        reasons = (leaf.reason for leaf in choice.leaves.values())
        obstacles = dict.fromkeys(r.because for r in reasons if isinstance(r, Replicated))
        raise UserError(
            f"no parameter can be divided over tensor={choice.size}",
            why="; ".join(map(str, list(obstacles)[:3])),
            fix=f"write {Setting('mesh.tensor', 1)} and put these devices on fsdp or data",
        )


def _check_heads(classes: DimClasses, leaf: LeafDims, choice: TensorChoice) -> None:
    for dim in leaf.dims:
        if not dim or dim[0].id not in classes.heads or dim[0].id in choice.ways:
            continue
        heads = 1
        for atom in joint(classes, dim):
            heads *= atom.size
        if heads < choice.size:
            fits = max(n for n in range(1, heads + 1) if heads % n == 0 and choice.size % n == 0)
            raise UserError(
                f"tensor={choice.size} is larger than the {heads} attention heads "
                f"of `{leaf.path.rpartition('.')[0]}`",
                why=f"attention is divided by whole heads, and {choice.size} devices cannot "
                f"share {heads}",
                fix=f"write {Setting('mesh.tensor', fits)}, or use a model with a multiple of "
                f"{choice.size} heads",
            )


class _Search:
    """What has been taken and refused so far.

    Attributes:
        by_class: the candidate each divided class was taken by.
        taken: by position of an input, the candidate that divides it.
        refused: the candidates that were not taken.
        refusals: by position of an input, those of them it has, with what stood in their way.
    """

    def __init__(self) -> None:
        self.by_class: dict[int, Candidate] = {}
        self.refused: list[Candidate] = []
        self.refusals = defaultdict[int, list[Refusal]](list)
        self.taken: dict[int, Candidate] = {}

    def consider(self, group: Sequence[Candidate]) -> None:
        """Take the candidates of one pattern, all or none unless they exclude each other."""
        kernels = [kernel for candidate in group for kernel in candidate.kernels]
        if len(set(kernels)) < len(kernels):
            for candidate in sorted(group, key=_score):
                self._settle([candidate])
        else:
            self._settle(group)

    def _settle(self, group: Sequence[Candidate]) -> None:
        rivals = [self._rival(candidate) for candidate in group]
        if any(rivals) or any(candidate.obstacle for candidate in group):
            self._refuse(group, rivals)
            return
        for candidate in group:
            self.by_class.update(dict.fromkeys(candidate.ways, candidate))
            for position in candidate.placed:
                self.taken.setdefault(position, candidate)

    def _refuse(self, group: Sequence[Candidate], rivals: Sequence[Candidate | None]) -> None:
        self.refused.extend(group)
        for candidate, rival in zip(group, rivals, strict=True):
            for position in candidate.touched:
                self.refusals[position].append((candidate, rival))

    def _rival(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate that stands in this one's way."""
        for kernel in candidate.kernels:
            if kernel in self.taken:
                return self.taken[kernel]
        for name in candidate.ways:
            if name in self.by_class:
                return self.by_class[name]
        return self._better_but_refused(candidate)

    def _better_but_refused(self, candidate: Candidate) -> Candidate | None:
        """Return a refused candidate this one would be a poor substitute for.

        That is one whose reductions are all among this one's (a head's dim for the heads), or one
        of much less communication that only its size rules out, if such ones account for most of
        what would be divided.
        """
        others = [
            refused
            for refused in self.refused
            if refused.obstacle
            and refused.kernels & candidate.kernels
            and not refused.ways.keys() & candidate.ways.keys()
        ]
        for other in others:
            if other.cost < candidate.cost and other.reductions <= candidate.reductions:
                return other
        cheaper = [
            other
            for other in others
            if other.obstacle == "size" and SUBSTITUTE_COST * other.cost < candidate.cost
        ]
        wanted = frozenset[int]().union(*(other.kernels for other in cheaper)) & candidate.kernels
        if cheaper and 2 * candidate.bytes_of(wanted) >= candidate.cover:
            return max(cheaper, key=lambda other: other.bytes_of(other.kernels & wanted))
        return None


def _groups(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    groups = defaultdict[Pattern, list[Candidate]](list)
    for candidate in candidates:
        groups[candidate.pattern].append(candidate)
    return sorted(
        groups.values(),
        key=lambda group: sum(c.cost for c in group) / max(1, sum(c.cover for c in group)),
    )


def _score(candidate: Candidate) -> float:
    return candidate.cost / max(1, candidate.cover)


def _leaf_choice(
    classes: DimClasses, position: int, leaf: LeafDims, search: _Search, size: int
) -> LeafChoice:
    candidate = search.taken.get(position)
    if candidate is not None:
        dim = candidate.placed[position]
        role = _role(leaf, dim, candidate)
        return LeafChoice(leaf.path, dim, role, why_placed(classes, leaf, dim, role, candidate))
    refusals = search.refusals[position]
    reason = why_replicated(classes, leaf, refusals, size)
    best = cheapest(refusals)[0] if refusals else None
    fused = fused_factor(leaf, best) if best and best.obstacle == "inside" else None
    return LeafChoice(leaf.path, None, "replicated", reason, FusedDim(*fused) if fused else None)


def _role(leaf: LeafDims, dim: int, candidate: Candidate) -> TensorRole:
    if not leaf.is_kernel:
        return "follows"
    names = {atom.id for atom in leaf.dims[dim]} & candidate.ways.keys()
    if names & leaf.uses.get("lookup", frozenset()):
        return "vocabulary"
    if names & leaf.uses.get("row", frozenset()):
        return "row"
    return "expert" if names & leaf.uses.get("batched", frozenset()) else "column"
