"""Which weights of a model get adapters: by path patterns, and by what the loss does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.config.schema import LoRA
from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.names import matches
from meshwright.program.trace.adapters import Adapter
from meshwright.program.trace.add_adapters import Uses, find_uses
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.program.trace.trained_leaves import check_patterns
from meshwright.trees import Batch

TARGETS = "lora.targets"


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
    uses = find_uses(trace_loss(loss, model_leaves.base, batch).closed, list(frozen))
    if lora.targets is None:
        chosen = _linear(frozen, uses)
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
    return model_leaves.with_adapters({n: _adapter(frozen[n], uses[n], lora) for n in chosen})


def _linear(frozen: Mapping[int, Leaf], uses: Mapping[int, Uses]) -> list[int]:
    """Return linear layers and convolutions: no embeddings, and no head of an embedding's shape."""
    tables = {frozen[n].shape for n in frozen if uses[n].lookup}
    heads = {*tables, *(shape[::-1] for shape in tables)}
    return [n for n, leaf in frozen.items() if uses[n].split and leaf.shape not in heads]


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
