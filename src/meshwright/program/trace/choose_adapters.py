"""Which weights of a model get adapters: by path patterns, and by what the loss does with them."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from meshwright.config.lora_section import LoRA
from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.equations import CALLS, REMATS, ClosedJaxpr, Equation
from meshwright.program.jaxpr.names import matches
from meshwright.program.jaxpr.walks import called_programs, propagate
from meshwright.program.trace.adapters import Adapter
from meshwright.program.trace.add_adapters import USES, Uses, find_uses
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.program.trace.trained_leaves import check_patterns
from meshwright.trees import Batch

TARGETS = "lora.targets"

_ENTERED = CALLS | REMATS | {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}


def adapt_model(model_leaves: ModelLeaves, loss: Loss, batch: Batch) -> ModelLeaves:
    """Return a model with its adapters; the model itself if it is to have none.

    The program of the loss says which dims of a weight are inputs and outputs.
    """
    lora = model_leaves.lora
    if lora is None:
        return model_leaves
    frozen = {n: leaf for n, leaf in enumerate(model_leaves.leaves) if leaf.is_frozen}
    closed = trace_loss(loss, model_leaves.base, batch).closed
    uses = find_uses(closed, [n for n, x in enumerate(model_leaves.base.leaves) if x.is_weight])
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


def describe_adapters(leaves: ModelLeaves) -> str:
    """Say in one line which weights have adapters, and which could have one; empty without any."""
    both = [each.path for each in leaves.adapters.values()], leaves.left_out
    short = (dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in paths) for paths in both)
    adapted, left_out = map(", ".join, short)
    return adapted and f"adapted: {adapted}" + (left_out and f"; left out: {left_out}")


def _linear(closed: ClosedJaxpr, frozen: Mapping[int, Leaf], uses: Mapping[int, Uses]) -> list[int]:
    """Return linear layers and convolutions: no tables, and no layer of logits over a table."""
    rows = {leaf.shape[0] for n, leaf in frozen.items() if uses[n].lookup}
    plain = {n: use.split.outputs for n, use in uses.items() if use.split}
    own = {n for n in plain if n in frozen and not uses[n].lookup}
    over = {n for n in own if any(frozen[n].shape[d] in rows for d in plain[n])}
    return sorted(own - (over and over & _logits(closed, plain)))


def _logits(closed: ClosedJaxpr, leaves: Collection[int]) -> set[int]:
    """Return the weights whose products are exponentiated, and not multiplied by other weights."""
    none, followed, exponents = frozenset[int](), set[int](), set[int]()

    def rule(eqn: Equation, facts: list[frozenset[int]]) -> list[frozenset[int]]:
        """Follow weights by number, and what is computed from their products by ~number."""
        name = eqn.primitive.name
        if name in _ENTERED:
            # The first program of a while loop is its condition.
            bodies = [program.jaxpr for program, _ in called_programs(eqn)][name == "while" :]
            runs = [propagate(p, facts[len(facts) - len(p.invars) :], none, rule) for p in bodies]
            return [none.union(*each) for each in zip(*runs, strict=True)]
        found = none.union(*facts)
        weights = {n for n in found if n >= 0}
        if weights and name in USES:
            followed.update(found - weights)
            found = frozenset(~n for n in weights)
        elif name == "exp":
            exponents.update(found)
        return [found] * len(eqn.outvars)

    given = [frozenset({n}) if n in leaves else none for n in range(len(closed.jaxpr.invars))]
    propagate(closed.jaxpr, given, none, rule)
    return {~n for n in exponents - followed}


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
