"""Why a mesh cannot be used, before anything is estimated; and settings that exclude each other."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.config.batch import nearest_divisors, share_rows
from meshwright.config.microbatches import multiples_around
from meshwright.errors import Setting, UserError
from meshwright.hardware import Hardware
from meshwright.mesh.axes import AXES, CONTEXT, PIPE, describe_sizes, shown_sizes
from meshwright.plan import check_context
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import (
    PlanTask,
    Sizes,
    Variant,
    first_variants,
    make_candidate,
    micro_batch_sizes,
)
from meshwright.text.units import counted

Kind = Literal["blocks", "division", "topology", "batch", "memory", "slower"]
"""What a mesh is rejected for."""
LEAST_SHARDED = 0.02
"""The part of the training state below which an axis counts as sharding nothing."""


@dataclass(frozen=True)
class Rejection:
    """A mesh that is not recommended, and why; its estimate, if there is one."""

    mesh: dict[str, int]
    kind: Kind
    reason: str
    estimate: Estimate | None = None

    @property
    def distance(self) -> float:
        """How far the mesh is from being recommended, compared with others of its kind."""
        if self.estimate is None:
            return 0.0
        return self.estimate.memory.total if self.kind == "memory" else self.estimate.time.step

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"mesh": self.mesh, "kind": self.kind, "reason": self.reason}

    def __str__(self) -> str:
        return f"{describe_sizes(self.mesh)}: {self.reason}"


def find_obstacle(estimator: Estimator, task: PlanTask, sizes: Sizes) -> Rejection | None:
    """Return why a mesh cannot be used; None if it can."""
    for check, kind in _CHECKS.items():
        if reason := check(estimator, task, sizes):
            return Rejection(shown_sizes(sizes), kind, reason)
    return None


def _blocks(estimator: Estimator, task: PlanTask, sizes: Sizes) -> str:
    stages, blocks, fixed = sizes["pipe"], estimator.num_blocks, task.fixed
    chunks = fixed.num_chunks or 2 if fixed.schedule == "interleaved" else 1
    if stages == 1 or stages * chunks <= blocks:
        return ""
    has = f"the model has {blocks}" if blocks else "the model has no repeated blocks"
    needs = "a block for each stage"
    if chunks > 1:
        needs = f"{stages * chunks} blocks for {chunks} chunks a stage"
    return f"pipe={stages} needs {needs}, and {has}"


def _division(estimator: Estimator, task: PlanTask, sizes: Sizes) -> str:
    size, possible = sizes["tensor"], estimator.tensor_sizes
    if size == 1 or size in possible:
        return ""
    working = [each for each in sorted(possible) if each > 1 and task.hardware.count % each == 0]
    would = ", ".join(map(str, working)) or "no other size"
    return f"tensor={size} does not divide the model's heads and features; {would} would"


def _topology(_: Estimator, task: PlanTask, sizes: Sizes) -> str:
    hardware, size = task.hardware, sizes["tensor"]
    if "tensor" in task.fixed.mesh or not crosses_nodes(hardware, size):
        return ""
    return (
        f"tensor={size} crosses nodes of {counted(hardware.devices_per_node, 'device')}: each "
        f"layer would wait for {speeds(hardware)}"
    )


def crosses_nodes(hardware: Hardware, size: int) -> bool:
    """Whether an innermost axis of this size has devices of different nodes in a group."""
    return hardware.nodes > 1 and hardware.devices_per_node % size != 0


def speeds(hardware: Hardware) -> str:
    """Return how fast devices of different nodes are connected, compared with those of one."""
    chip = hardware.chip
    within = f"{chip.intra_node_gb_per_s:g} GB/s within a node"
    if chip.inter_node_gb_per_s is None:
        return f"the network between nodes, against {within}"
    return f"the network's {chip.inter_node_gb_per_s:g} GB/s, against {within}"


def _batch(estimator: Estimator, task: PlanTask, sizes: Sizes) -> str:
    replicas, batch = sizes["data"] * sizes["fsdp"], task.global_batch_size
    copies = f"data={sizes['data']} × fsdp={sizes['fsdp']} = {counted(replicas, 'replica')}"
    if batch < replicas:
        return f"a global batch of {counted(batch, 'sample')} is smaller than {copies}"
    if batch % replicas:
        return f"a global batch of {batch} samples cannot be divided over {copies}"
    variant = first_variants(task, sizes, estimator.num_blocks)[0]
    if micro_batch_sizes(task, sizes, variant):
        return ""
    own = batch // replicas
    asked = _asked(task, variant)
    return f"the {own} samples of each replica do not allow {asked}{_dividing(task, own)}"


def _context(estimator: Estimator, task: PlanTask, sizes: Sizes) -> str:
    size = sizes.get(CONTEXT, 1)
    if size == 1:
        return ""
    if sizes["pipe"] > 1 or (task.fixed.sync_gradients_every or 1) > 1:
        other = "stages need" if sizes["pipe"] > 1 else "training.sync_gradients_every needs"
        return f"context={size} divides rows, which {other} whole"
    return estimator.row_obstacle(sizes)


def _undivided(estimator: Estimator, task: PlanTask, sizes: Sizes) -> str:
    """Refuse an fsdp axis that divides no dim: it would cost what it saves nothing for."""
    size = sizes["fsdp"]
    if size == 1 or "fsdp" in task.fixed.mesh:
        return ""
    variant = first_variants(task, sizes, estimator.num_blocks)[0]
    plan = make_candidate(task, sizes, variant, micro_batch_sizes(task, sizes, variant)[-1])
    if estimator.sharded_share(plan, "fsdp") > LEAST_SHARDED:
        return ""
    return f"fsdp={size} shards nothing: it does not divide the dims of the parameters"


_CHECKS: dict[Callable[[Estimator, PlanTask, Sizes], str], Kind] = {
    _blocks: "blocks",
    _division: "division",
    _topology: "topology",
    _batch: "batch",
    _context: "division",
    _undivided: "division",
}
"""What returns why a mesh cannot be used, empty if it can, in the order in which they are asked."""


def _dividing(task: PlanTask, own: int) -> str:
    """Name microbatches that divide the samples of a replica, if those that are set do not."""
    micro = task.fixed.micro_batch_size
    if micro is None or own % micro == 0:
        return ""
    return f", but {Setting('training.micro_batch_size', *nearest_divisors(own, micro))}"


def _asked(task: PlanTask, variant: Variant) -> str:
    fixed = task.fixed
    settings = {
        "training.micro_batch_size": fixed.micro_batch_size,
        "training.gradient_accumulation_steps": fixed.gradient_accumulation_steps,
        "training.sync_gradients_every": fixed.sync_gradients_every,
        "pipeline.num_microbatches": fixed.num_microbatches,
        "pipeline.num_chunks": variant.num_chunks if variant.num_chunks > 1 else None,
    }
    given = [str(Setting(key, value)) for key, value in settings.items() if value is not None]
    return " with ".join(given)


def check_fixed_mesh(task: PlanTask) -> None:
    """Refuse sizes of axes that the devices cannot have."""
    fixed, count = task.fixed.mesh, task.hardware.count
    every = task.fixed.sync_gradients_every or 1
    check_context(fixed.get(CONTEXT, 1), stages=fixed.get(PIPE, 1), sync_gradients_every=every)
    known = math.prod(fixed.values())
    whole = {*fixed, CONTEXT} == set(AXES)
    if count % known == 0 and (not whole or known == count):
        return
    terms = [f"mesh.{axis}={size}" for axis, size in fixed.items() if size > 1]
    product = f" = {known}" if len(terms) > 1 else ""
    raise UserError(
        f"the mesh does not match the {counted(count, 'device')} of {task.hardware}",
        why=f"{' × '.join(terms) or 'every axis has size 1'}{product}, which "
        + ("is not" if whole else "does not divide")
        + f" {count}",
        fix="leave some of these sizes out to have them chosen",
    )


def no_mesh(task: PlanTask, rejected: Iterable[Rejection]) -> UserError:
    """Return the error for settings that no mesh agrees with."""
    # What the user set first: blocks and layers exclude meshes of any model.
    ordered = sorted(rejected, key=lambda each: each.kind != "batch")
    reasons = list(dict.fromkeys(each.reason for each in ordered))
    no_mesh_fits = f"no mesh of {task.hardware} agrees with these settings"
    nearest = _nearest_batches(task, [each for each in ordered if each.kind == "batch"])
    if nearest:
        # Any other obstacle would have been found first, so this batch is the only one.
        first, *reasons = reasons
        what, why = first, [no_mesh_fits, *reasons[:1]]
    else:
        what, why = no_mesh_fits, reasons[:2]
    more = len(reasons) - (1 if nearest else 2)
    rest = [f"and {counted(more, 'similar reason')}"] if more > 0 else []
    batch = Setting("training.global_batch_size", *nearest)
    change = "write" if nearest else "change"
    few = task.global_batch_size < task.hardware.count and CONTEXT not in task.fixed.mesh
    shared = f", {share_rows(task.global_batch_size, task.hardware.count)}" if few else ""
    return UserError(
        what,
        why="; ".join([*why, *rest]),
        fix=f"{change} {batch}{shared}, or leave settings of the mesh and the batch out",
    )


def _nearest_batches(task: PlanTask, rejected: Iterable[Rejection]) -> list[int]:
    """Return the global batches on both sides of the one asked for that these meshes divide."""
    fixed, batch, near = task.fixed, task.global_batch_size, set[int]()
    whole = fixed.micro_batch_size and fixed.gradient_accumulation_steps
    for mesh in (each.mesh for each in rejected):
        least = mesh.get("data", 1) * mesh.get("fsdp", 1) * (fixed.micro_batch_size or 1)
        least *= fixed.gradient_accumulation_steps or _least_microbatches(task, mesh)
        near |= {least} if whole else {*multiples_around(batch, least)}
    below, above = [n for n in near if n < batch], [n for n in near if n > batch]
    return [*sorted(below)[-1:], *sorted(above)[:1]]


def _least_microbatches(task: PlanTask, mesh: Sizes) -> int:
    """Return what the number of microbatches must be a multiple of."""
    fixed, stages = task.fixed, mesh.get("pipe", 1)
    flushed = (fixed.num_microbatches or 1) if stages > 1 else 1
    group = stages if fixed.schedule == "interleaved" else 1
    return math.lcm(fixed.sync_gradients_every or 1, flushed, group)
