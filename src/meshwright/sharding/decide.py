"""Deciding where every leaf lives: the user's rules, the author's annotations, then the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import ALIASES, AXES
from meshwright.program.dims import DimClasses, LeafLabel, find_dim_classes
from meshwright.program.forward import GatherSpecs
from meshwright.program.jaxprs import Var
from meshwright.program.layout import StepLeaf
from meshwright.program.pins import find_pins
from meshwright.program.trace import TracedLoss
from meshwright.sharding.placement import DimAxes, Placement, add_fsdp
from meshwright.sharding.rules import apply_rule, check_rules, explicit, find_rule
from meshwright.sharding.tensor import TensorChoice, check_tensor_size, choose_tensor_dims


@dataclass(frozen=True)
class Decision:
    """Where everything lives.

    Attributes:
        at_rest: for each step leaf, where it lives between updates.
        optimizer: for each step leaf, where its optimizer state lives.
        gradients: for each step leaf, where its gradient is reduced to.
        gathers: by number, the step leaves that are gathered for use.
        pins: where activations live.
        batch: how batches are divided.
        classes: the dims of the program.
        tensor: what the tensor axis divides.
    """

    at_rest: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    gathers: Mapping[int, GatherSpecs]
    pins: Mapping[Var, PartitionSpec]
    batch: PartitionSpec
    classes: DimClasses
    tensor: TensorChoice


def decide(traced: TracedLoss, sizes: Mapping[str, int], sharding: ShardingConfig) -> Decision:
    """Decide where leaves, gradients, optimizer state and activations live on a mesh."""
    classes = dim_classes(traced)
    tensor = choose_tensor_dims(classes, sizes.get("tensor", 1))
    check_tensor_size(classes, tensor)
    paths = [leaf.path for leaf in traced.layout.leaves]
    check_rules(sharding.rules, [p.path for p in traced.layout.leaves if p.role == "param"])
    divided = tuple(
        _place(step, paths, classes, tensor, sizes, sharding) for step in traced.layout.step_leaves
    )
    whole = tuple(_drop_fsdp(placement) for placement in divided)
    batch_axes = {a: sizes[a] for a in ("data", "fsdp") if sizes.get(a, 1) > 1}
    return Decision(
        at_rest=divided if sharding.zero == 3 else whole,
        optimizer=divided,
        gradients=whole if sharding.zero == 1 else divided,
        gathers=_gathers(traced.layout.step_leaves, divided) if sharding.zero == 3 else {},
        pins=find_pins(classes, batch_axes=batch_axes, tensor_dim=tensor.sharded_dim)
        if batch_axes or tensor.size > 1
        else {},
        batch=PartitionSpec(tuple(batch_axes)) if batch_axes else PartitionSpec(),
        classes=classes,
        tensor=tensor,
    )


def dim_classes(traced: TracedLoss) -> DimClasses:
    """Find the dim classes of a traced loss."""
    labels = [LeafLabel(leaf.role, leaf.path) for leaf in traced.leaves]
    labels += [LeafLabel("batch", leaf.path) for leaf in traced.batch]
    return find_dim_classes(traced.closed, labels)


def _place(
    step: StepLeaf,
    paths: Sequence[str],
    classes: DimClasses,
    tensor: TensorChoice,
    sizes: Mapping[str, int],
    sharding: ShardingConfig,
) -> Placement:
    leaf = step.leaf
    if leaf.role == "param" and (rule := find_rule(sharding.rules, step, paths)):
        return apply_rule(*rule, step, classes, sizes)
    if leaf.annotation is not None and _names_axes(leaf.annotation):
        asked = explicit(leaf.path, leaf.annotation, len(leaf.shape), "annotated in the model")
        return _present(asked, sizes)
    dims: list[DimAxes] = [()] * len(leaf.shape)
    choice = tensor.leaves.get(leaf.path)
    if choice is not None and choice.dim is not None:
        dims[choice.dim] = ("tensor",)
    reason = choice.reason if choice is not None else ""
    if leaf.role == "state" or sizes.get("fsdp", 1) == 1:
        return Placement(leaf.path, tuple(dims), reason or "the same on every device")
    # A stack's first dim is the blocks: dividing it would put whole blocks on single devices.
    placed = add_fsdp(
        leaf,
        dims,
        size=sizes["fsdp"],
        smallest=sharding.min_shard_size,
        keep=1 if step.stacked else 0,
    )
    return Placement(leaf.path, placed.dims, "; ".join(filter(None, (reason, placed.reason))))


def _names_axes(annotation: Sequence[object]) -> bool:
    names = [name for name in annotation if name is not None]
    return bool(names) and all(name in AXES or name in ALIASES for name in names)


def _present(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    dims = tuple(tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in placement.dims)
    return Placement(placement.path, dims, placement.reason)


def _drop_fsdp(placement: Placement) -> Placement:
    dims = tuple(tuple(axis for axis in axes if axis != "fsdp") for axes in placement.dims)
    return Placement(placement.path, dims, placement.reason)


def _gathers(steps: Sequence[StepLeaf], placements: Sequence[Placement]) -> dict[int, GatherSpecs]:
    return {
        number: GatherSpecs(whole=placement.without("fsdp"), divided=placement.spec)
        for number, (step, placement) in enumerate(zip(steps, placements, strict=True))
        if step.leaf.role == "param" and "fsdp" in placement.axes()
    }
