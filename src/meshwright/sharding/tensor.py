"""Tensor parallelism: choosing the dim of each parameter that the tensor axis shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import Setting, UserError
from meshwright.program.dims.classes import WEIGHTS, DimClasses, LeafDims
from meshwright.program.dims.factors import DimFactor
from meshwright.sharding.tensor_candidates import (
    Candidate,
    Pattern,
    dims_with,
    find_candidates,
    parts_along,
    reduced_together,
)
from meshwright.sharding.tensor_explain import Rejection, TensorRole, why_placed, why_whole

SUBSTITUTE_COST = 3
"""A dim class that the axis does not divide is replaced by another only if that one communicates
at most this many times as much; beyond that, replicating the parameter is cheaper."""


@dataclass(frozen=True, slots=True)
class LeafChoice:
    """The dim of one leaf that the tensor axis shards.

    Attributes:
        dim: the sharded dim; None if every device holds the whole leaf.
        obstacle: for a leaf that every device holds whole, what rules out sharding it.
    """

    dim: int | None
    role: TensorRole
    reason: str
    obstacle: str = ""


@dataclass(frozen=True)
class TensorChoice:
    """How a model is sharded over the tensor axis: the choice for each leaf by canonical path.

    ``splits`` are the numbers of parts of each sharded class, for activations.
    """

    size: int
    leaves: Mapping[str, LeafChoice]
    splits: Mapping[int, int]

    def dim_of(self, path: str) -> int | None:
        """Return the sharded dim of a leaf."""
        return self.leaves[path].dim

    def sharded_dim(self, dims: Sequence[tuple[DimFactor, ...]]) -> int | None:
        """Return the dim of an activation that the axis shards; None if not exactly one fits."""
        fitting = [d for d, dim in enumerate(dims) if parts_along(dim, self.splits) == self.size]
        return fitting[0] if len(fitting) == 1 else None


def choose_tensor_dims(classes: DimClasses, tensor_size: int) -> TensorChoice:
    """Choose at most one dim of every leaf for a tensor axis of this size.

    Candidates are considered in order of communication per parameter byte, cheapest first. The
    candidates of repeated blocks are accepted or rejected together. A class that is both dims of
    a parameter, as in a residual branch of one layer, is sharded only if no other can be: every
    product then sends its result.
    """
    if tensor_size == 1:
        return TensorChoice(1, {}, {})
    search = _search(find_candidates(classes, tensor_size))
    if not any(classes.leaves[i].role in WEIGHTS for i in search.accepted):
        search = _search(find_candidates(classes, tensor_size, square=True))
    splits = {name: candidate.splits[name] for name, candidate in search.by_class.items()}
    leaves = {
        leaf.path: _leaf_choice(classes, position, leaf, search, tensor_size)
        for position, leaf in enumerate(classes.leaves)
        if leaf.role != "batch"
    }
    return TensorChoice(tensor_size, leaves, splits)


def _search(candidates: Iterable[Candidate]) -> _Search:
    groups = defaultdict[Pattern, list[Candidate]](list)
    for candidate in candidates:
        groups[candidate.pattern].append(candidate)
    search = _Search()
    for group in sorted(groups.values(), key=_score):
        search.consider(group)
    return search


def check_tensor_size(classes: DimClasses, choice: TensorChoice) -> None:
    """Raise a `UserError` if the tensor axis is too large for the model."""
    if choice.size == 1:
        return
    for leaf in classes.weights:
        if leaf.is_kernel and choice.dim_of(leaf.path) is None:
            _check_heads(classes, leaf, choice)
    if all(leaf.dim is None for leaf in choice.leaves.values()):
        obstacles = dict.fromkeys(leaf.obstacle for leaf in choice.leaves.values())
        raise UserError(
            f"no parameter can be sharded over tensor={choice.size}",
            why="; ".join(list(obstacles)[:3]),
            fix=f"write {Setting('mesh.tensor', 1)} and put these devices on fsdp or data",
        )


def _check_heads(classes: DimClasses, leaf: LeafDims, choice: TensorChoice) -> None:
    for dim in leaf.dims:
        if not dim or dim[0].id not in classes.heads or dim[0].id in choice.splits:
            continue
        heads = math.prod(factor.size for factor in reduced_together(classes, dim))
        if heads < choice.size:
            fits = math.gcd(heads, choice.size)
            raise UserError(
                f"tensor={choice.size} is larger than the {heads} attention heads "
                f"of `{leaf.path.rpartition('.')[0]}`",
                why=f"attention is sharded by whole heads, and {choice.size} devices cannot "
                f"share {heads}",
                fix=f"write {Setting('mesh.tensor', fits)}, or use a model with a multiple of "
                f"{choice.size} heads",
            )


class _Search:
    """The candidates accepted and rejected so far.

    Attributes:
        by_class: for each sharded class, the accepted candidate that shards it.
        accepted: by position of an input, the candidate that shards it.
        rejected: the candidates that were not accepted.
        rejections: by position of an input, its rejected candidates with their rivals.
    """

    def __init__(self) -> None:
        self.by_class: dict[int, Candidate] = {}
        self.rejected: list[Candidate] = []
        self.rejections = defaultdict[int, list[Rejection]](list)
        self.accepted: dict[int, Candidate] = {}

    def consider(self, group: Sequence[Candidate]) -> None:
        """Accept the candidates of one pattern, all or none unless they exclude each other."""
        kernels = [kernel for candidate in group for kernel in candidate.kernels]
        if len(set(kernels)) < len(kernels):
            for alone in sorted(([candidate] for candidate in group), key=_score):
                self._settle(alone)
        else:
            self._settle(group)

    def _settle(self, group: Sequence[Candidate]) -> None:
        rivals = [self._rival(candidate) for candidate in group]
        if any(rivals) or any(candidate.obstacle for candidate in group):
            self.rejected.extend(group)
            for candidate, rival in zip(group, rivals, strict=True):
                for position in candidate.touched:
                    self.rejections[position].append((candidate, rival))
            return
        for candidate in group:
            self.by_class.update(dict.fromkeys(candidate.splits, candidate))
            for position in candidate.placed:
                self.accepted.setdefault(position, candidate)

    def _rival(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate that rules this one out, if any."""
        for kernel in candidate.kernels:
            if kernel in self.accepted:
                return self.accepted[kernel]
        for name in candidate.splits:
            if name in self.by_class:
                return self.by_class[name]
        return self._better_but_rejected(candidate)

    def _better_but_rejected(self, candidate: Candidate) -> Candidate | None:
        """Return a rejected candidate that this one would be a poor substitute for.

        That is one whose reductions are all among this one's (the dim of a head instead of the
        heads), or one that communicates much less and is ruled out by its size alone, if such
        candidates account for most of the bytes that this one would shard.
        """
        others = [
            rejected
            for rejected in self.rejected
            if rejected.obstacle
            and rejected.kernels & candidate.kernels
            and not rejected.splits.keys() & candidate.splits.keys()
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


def _score(group: Sequence[Candidate]) -> float:
    """Return the communication per parameter byte of some candidates together."""
    return sum(c.cost for c in group) / max(1, sum(c.cover for c in group))


def _leaf_choice(
    classes: DimClasses, position: int, leaf: LeafDims, search: _Search, size: int
) -> LeafChoice:
    candidate = search.accepted.get(position)
    if candidate is not None:
        dim = candidate.placed[position]
        role = _role(leaf, dim, candidate)
        return LeafChoice(dim, role, why_placed(classes, leaf, dim, role, candidate))
    obstacle = why_whole(classes, leaf, search.rejections[position], size)
    return LeafChoice(None, "replicated", f"not sharded over tensor: {obstacle}", obstacle)


def _role(leaf: LeafDims, dim: int, candidate: Candidate) -> TensorRole:
    if not leaf.is_kernel:
        return "follows"
    if len(dims_with(leaf, candidate.splits)) > 1:
        return "column"
    names = {factor.id for factor in leaf.dims[dim]} & candidate.splits.keys()
    if names & leaf.uses.get("lookup", frozenset()):
        return "vocabulary"
    if names & leaf.uses.get("row", frozenset()):
        return "row"
    return "expert" if names & leaf.uses.get("batched", frozenset()) else "column"
