"""Which weights of a model get adapters: by path patterns, and by what the loss does with them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.config.schema import LoRA
from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.equations import (
    CALLS,
    CUSTOM_DERIVATIVES,
    REMATS,
    ClosedJaxpr,
    Equation,
)
from meshwright.program.jaxpr.names import matches
from meshwright.program.jaxpr.walks import called_programs, propagate
from meshwright.program.trace.adapters import Adapter
from meshwright.program.trace.add_adapters import USES, Uses, find_uses
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.program.trace.trained_leaves import check_patterns
from meshwright.trees import Batch

TARGETS = "lora.targets"

_ENTERED = CALLS | REMATS | CUSTOM_DERIVATIVES | {"scan", "while", "cond"}

_Fact = tuple[frozenset[int], frozenset[int]]
"""The weights that a value is, and those whose products it is computed from."""


def adapt_model(model_leaves: ModelLeaves, loss: Loss, batch: Batch) -> ModelLeaves:
    """Return a model with its adapters; the model itself if it is to have none.

    Args:
        model_leaves: the model.
        loss: its loss, whose program says which dims of a weight are inputs and outputs.
        batch: a batch, as arrays or shapes.
    """
    lora = model_leaves.lora
    if lora is None:
        return model_leaves
    frozen = {n: leaf for n, leaf in enumerate(model_leaves.leaves) if leaf.is_frozen}
    closed = trace_loss(loss, model_leaves.base, batch).closed
    uses = find_uses(closed, list(frozen))
    if lora.targets is None:
        chosen = _linear(closed, frozen, uses)
    else:
        paths = [leaf.path for leaf in frozen.values()]
        check_patterns(TARGETS, lora.targets, paths, "frozen weight")
        chosen = _named(lora.targets, frozen, uses)
    if not chosen:
        raise UserError(
            "no weight of the model can have an adapter",
            why="none of its frozen weights is multiplied, convolved with or looked up",
            fix=f"leave out {Setting('lora.rank')}, or train other parameters "
            f"({Setting('training.trainable')})",
        )
    adapters = {n: _adapter(frozen[n], uses[n], lora) for n in chosen}
    others = [leaf.path for n, leaf in frozen.items() if uses[n].split and n not in adapters]
    return replace(model_leaves.with_adapters(adapters), left_out=tuple(others))


def describe_adapters(model_leaves: ModelLeaves) -> str:
    """Say in one line which weights have adapters, and which could have one; empty without any."""
    paths = [adapter.path for adapter in model_leaves.adapters.values()]
    with_one, without = (
        ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in each))
        for each in (paths, model_leaves.left_out)
    )
    if not paths:
        return ""
    return f"adapted: {with_one}" + (f"; left out: {without}" if without else "")


def _linear(closed: ClosedJaxpr, frozen: Mapping[int, Leaf], uses: Mapping[int, Uses]) -> list[int]:
    """Return linear layers and convolutions: no tables, and no layer of logits over a table."""
    tables = [n for n in frozen if uses[n].lookup]
    rows = {_size(frozen[n], uses[n].splits[0].inputs) for n in tables}
    plain = {n: use.split for n, use in uses.items() if use.split and not use.lookup}
    heads = _logits(closed, list(plain)) if rows else set[int]()
    return [
        n
        for n, split in plain.items()
        if n not in heads or _size(frozen[n], split.outputs) not in rows
    ]


def _size(leaf: Leaf, dims: Iterable[int]) -> int:
    return math.prod(leaf.shape[d] for d in dims)


def _logits(closed: ClosedJaxpr, leaves: Collection[int]) -> set[int]:
    """Return the weights whose products are exponentiated, and no other weight's inputs."""
    none = frozenset[int]()
    followed, exponents = set[int](), set[int]()

    def rule(eqn: Equation, facts: list[_Fact]) -> list[_Fact]:
        name = eqn.primitive.name
        if name in _ENTERED:
            programs = [program.jaxpr for program, _ in called_programs(eqn)]
            runs = [
                propagate(inner, facts[-len(inner.invars) :], (none, none), rule)
                for inner in (programs[-1:] if name == "while" else programs)
            ]
            return [_union(each) for each in zip(*runs, strict=True)]
        weights, products = _union(facts)
        if weights and name in USES:
            followed.update(products)
            weights, products = none, weights
        elif name == "exp":
            exponents.update(products)
        return [(weights, products)] * len(eqn.outvars)

    inputs = range(len(closed.jaxpr.invars))
    given = [(frozenset({n}) if n in leaves else none, none) for n in inputs]
    propagate(closed.jaxpr, given, (none, none), rule)
    return exponents - followed


def _union(facts: Iterable[_Fact]) -> _Fact:
    pairs = [(frozenset[int](), frozenset[int]()), *facts]
    weights, products = (frozenset[int]().union(*each) for each in zip(*pairs, strict=True))
    return weights, products


def _named(
    patterns: Sequence[str], frozen: Mapping[int, Leaf], uses: Mapping[int, Uses]
) -> list[int]:
    """Return what patterns name; a pattern without wildcards must name what can have an adapter."""
    chosen: dict[int, None] = {}
    for pattern in patterns:
        named = [n for n, leaf in frozen.items() if matches(pattern, leaf.path)]
        fitting = [n for n in named if uses[n].split]
        if not fitting:
            raise _unfit(pattern, frozen[named[0]], uses[named[0]])
        chosen |= dict.fromkeys(fitting)
    return sorted(chosen)


def _unfit(pattern: str, leaf: Leaf, uses: Uses) -> UserError:
    why = "the loss does not use it"
    if uses.others:
        why = f"it is used by {uses.others[0]}"
    elif uses.splits:
        why = "its uses sum over different dims of it"
    return UserError(
        f"`{leaf.path}`, which `{pattern}` of {Setting(TARGETS)} names, cannot have an adapter",
        why=f"{why}; adapters are added where a weight is multiplied, looked up, or the kernel of "
        "a convolution without groups",
        fix=f"name other weights, or train it whole: {Setting('training.trainable', leaf.path)}",
    )


def _adapter(leaf: Leaf, uses: Uses, lora: LoRA) -> Adapter:
    assert uses.split is not None
    assert lora.rank is not None
    scale = (lora.alpha or lora.rank) / lora.rank
    tied = uses.lookup and uses.product
    parts = (leaf.path, leaf.shape, uses.split, lora.rank, scale)
    return Adapter(*parts, uses.lookup, tied, lora.dropout)
