"""Deciding the placement of every leaf: by rules, by annotations, or by the traced program."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import AXES, BATCH_AXES, CONTEXT, entry_names, resolve_alias
from meshwright.program.dims.classes import DimClasses, LeafLabel, find_dim_classes
from meshwright.program.evaluate.weight_uses import GatherSpecs
from meshwright.program.kernels.context_attention import find_exchanges
from meshwright.program.kernels.find_kernels import (
    NO_KERNELS,
    KernelSearch,
    find_kernels,
    unsharded,
)
from meshwright.program.on_mesh.local_ops import find_local_ops
from meshwright.program.on_mesh.loop_reads import find_loop_reads
from meshwright.program.on_mesh.mesh_forward import ProgramLayouts
from meshwright.program.on_mesh.sharding_constraints import (
    activation_layouts,
    find_constraints,
    find_model_layouts,
    find_weights,
)
from meshwright.program.on_mesh.shared_inputs import find_shared_inputs
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.model_leaves import Leaf
from meshwright.program.trace.traced_loss import TracedLoss
from meshwright.sharding.placement import (
    BY_ANNOTATION,
    Placement,
    Reason,
    add_fsdp,
    add_pipe,
)
from meshwright.sharding.rules import (
    TENSOR_ROLES,
    annotated,
    apply_rule,
    by_rule,
    check_on_stages,
    check_rules,
    find_rule,
)
from meshwright.sharding.tensor import TensorChoice, check_tensor_size, choose_tensor_dims


@dataclass(frozen=True, kw_only=True)
class Decision(ProgramLayouts):
    """The placement of leaves, gradients, optimizer state and activations.

    Attributes:
        at_rest: placement of each step leaf between steps.
        optimizer: placement of the optimizer state of each step leaf.
        gradients: placement of the reduced gradient of each step leaf.
        gathers: by number, the step leaves that are gathered before use.
        batch: partition spec of a batch.
        tensor: the dims that the tensor axis shards.
        ignored: sharding constraints in the model that are not followed, a sentence each.
        search: which kernels were asked for.
    """

    at_rest: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    gathers: Mapping[int, GatherSpecs]
    batch: PartitionSpec
    classes: DimClasses
    tensor: TensorChoice
    ignored: tuple[str, ...] = ()
    search: KernelSearch | None = None


def decide(
    traced: TracedLoss,
    sizes: Mapping[str, int],
    sharding: ShardingConfig,
    *,
    staged: Collection[int] = (),
    search: KernelSearch | None = None,
    classes: DimClasses | None = None,
) -> Decision:
    """Decide how leaves, gradients, optimizer state and activations are placed on a mesh.

    ``staged`` are numbers of the step leaves that hold blocks of pipeline stages; the others belong
    to no stage and are sharded over all of them. ``search`` says which kernels may evaluate known
    parts of the program, by default none.
    """
    classes = classes or dim_classes(traced)
    tensor = choose_tensor_dims(classes, sizes.get("tensor", 1))
    if not sharding.rules:
        check_tensor_size(classes, tensor)
    check_rules(sharding.rules, [leaf.path for leaf in traced.layout.leaves if leaf.is_weight])
    sharded = place_leaves(traced, classes, tensor, sizes, sharding, staged)
    tensor_only = tuple(placement.gathered("fsdp", "pipe") for placement in sharded)
    without_fsdp = tuple(placement.gathered("fsdp") for placement in sharded)
    gathered = [
        number
        for number, step in enumerate(traced.layout.step_leaves)
        if sharding.zero == 3 and step.leaf.is_weight and "fsdp" in sharded[number].axes()
    ]
    axes = batch_axes(sizes)
    context = sizes.get(CONTEXT, 1)
    layout = activation_layouts(classes, axes, tensor.sharded_dim, context)
    of_samples = activation_layouts(classes, axes, tensor.sharded_dim)
    if not axes and tensor.size == 1 == context:
        layout = unsharded
    exchanges = find_exchanges(classes, layout, sizes)
    kernels = find_kernels(traced, classes, layout, search, exchanges) if search else NO_KERNELS
    of_model = find_model_layouts(classes, sizes=sizes, batch_axes=list(axes))
    return Decision(
        at_rest=sharded if sharding.zero == 3 else tensor_only,
        optimizer=sharded,
        gradients=without_fsdp if sharding.zero == 1 else sharded,
        gathers=gather_specs(gathered, sharded),
        activations={**find_constraints(classes, layout), **of_model.constraints},
        local_ops=find_local_ops(classes, of_samples, axes, tensor.size),
        shared_inputs=find_shared_inputs(classes, tensor.splits, layout),
        loop_reads=find_loop_reads(classes, axes),
        weights=find_weights(classes),
        batch=PartitionSpec(tuple(axes)) if axes else PartitionSpec(),
        classes=classes,
        tensor=tensor,
        ignored=of_model.ignored,
        kernels=kernels,
        search=search,
        exchanges=exchanges.with_kernels(kernels.attention),
    )


def batch_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh axes that shard the batch, outermost first, with their sizes."""
    return {axis: sizes[axis] for axis in BATCH_AXES if sizes.get(axis, 1) > 1}


def dim_classes(traced: TracedLoss) -> DimClasses:
    """Find the dim classes of a traced loss."""
    labels = [
        LeafLabel("frozen" if leaf.is_frozen else leaf.role, leaf.path) for leaf in traced.leaves
    ]
    labels += [LeafLabel("batch", leaf.path) for leaf in traced.batch]
    return find_dim_classes(traced.closed, labels)


def place_leaves(
    traced: TracedLoss,
    classes: DimClasses,
    tensor: TensorChoice,
    sizes: Mapping[str, int],
    sharding: ShardingConfig,
    staged: Collection[int] = (),
) -> tuple[Placement, ...]:
    """Return the placement of each step leaf, sharded as far as the mesh does.

    ``tensor`` are the dims that the tensor axis shards, and ``staged`` the numbers of the step
    leaves that hold blocks of pipeline stages.
    """
    paths = [leaf.path for leaf in traced.layout.leaves]
    stages, smallest = sizes.get("pipe", 1), sharding.min_shard_size

    def place(step: StepLeaf, *, on_stages: bool) -> Placement:
        leaf = step.leaf
        rule = find_rule(sharding.rules, step, paths, stages=stages) if leaf.is_weight else None
        if rule is not None and rule[1] not in TENSOR_ROLES:
            if on_stages and not isinstance(rule[1], str):
                check_on_stages(step, rule[1], by_rule(*rule), stages)
            return apply_rule(*rule, step, classes, sizes)
        if rule is not None:
            placed = apply_rule(*rule, step, classes, sizes)
        elif leaf.annotation is not None and _names_axes(leaf.annotation):
            if on_stages:
                check_on_stages(step, leaf.annotation[int(step.stacked) :], BY_ANNOTATION, stages)
            return annotated(leaf, sizes)
        else:
            placed = _by_program(leaf, tensor)
        if leaf.is_weight and sizes.get("fsdp", 1) > 1:
            # Dim 0 of a stack counts blocks; sharding it would put whole blocks on single devices.
            keep = int(step.stacked or on_stages)
            placed = add_fsdp(leaf, placed, size=sizes["fsdp"], smallest=smallest, keep=keep)
        if leaf.is_weight and staged and not on_stages:
            placed = add_pipe(leaf, placed, sizes=sizes, smallest=smallest)
        return placed

    steps = enumerate(traced.layout.step_leaves)
    return tuple(place(step, on_stages=number in staged) for number, step in steps)


def _by_program(leaf: Leaf, tensor: TensorChoice) -> Placement:
    """Place a leaf according to its use in the traced program."""
    choice = tensor.leaves.get(leaf.path)
    own = None if choice is None else choice.dim
    dims = tuple(("tensor",) if d == own else () for d in range(len(leaf.shape)))
    reasons: list[Reason] = []
    if leaf.annotation is not None:
        names = ", ".join(map(str, leaf.annotation))
        reasons.append(Reason(f"annotated ({names}), no mesh axis"))
    if choice is not None:
        reasons.append(Reason(choice.reason))
    return Placement(leaf.path, dims, tuple(reasons))


def _names_axes(annotation: Sequence[Any]) -> bool:
    names = [name for entry in annotation for name in entry_names(entry)]
    return bool(names) and all(resolve_alias(name) in AXES for name in names)


def gather_specs(
    numbers: Iterable[int], placements: Sequence[Placement], *manual: str
) -> dict[int, GatherSpecs]:
    """Return the layouts of weights sharded over fsdp, where some axes are manual."""
    return {
        n: GatherSpecs(placements[n].without("fsdp", *manual), placements[n].without(*manual))
        for n in numbers
    }
