"""The decision in plain words: why this mesh and these settings, or why no plan fits."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.microbatches import multiples_around
from meshwright.errors import ExitCode, Setting, UserError
from meshwright.hardware import LOCAL, Hardware, load_chips
from meshwright.mesh.axes import AXES, CONTEXT, MESH_AXES, MODEL_AXES, PIPE, describe_sizes
from meshwright.plan import Plan
from meshwright.planner.devices.local_hardware import SHARED
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import slower_because, within_error
from meshwright.planner.search.candidates import (
    MOST_UNROLLED,
    FixedSettings,
    PlanTask,
    first_variants,
    make_candidate,
)
from meshwright.planner.search.obstacles import LEAST_SHARDED, Rejection
from meshwright.planner.search.search import SearchResult, search
from meshwright.planner.search.what_if import ScalingPoint, enough_devices, smallest_cluster
from meshwright.text.units import counted, human_bytes, human_seconds

MOSTLY = 0.9
"""The part of the training state from which an axis is said to shard all of it."""
LOOKED_AT = 12
"""How many of the fastest meshes without an axis are searched to explain it."""


def alone(estimator: Estimator, task: PlanTask) -> Estimate:
    """Return what a whole copy of the model needs on one device, with as little as possible."""
    device, count = Hardware(chip=task.hardware.chip, count=1), estimator.num_blocks
    single = replace(task, hardware=device, global_batch_size=1, fixed=type(task.fixed)())
    sizes = dict.fromkeys(AXES, 1)
    leanest = first_variants(single, sizes, count)[-1]
    if count <= MOST_UNROLLED:
        leanest = replace(leanest, blocks="unroll")
    return estimator.estimate(make_candidate(single, sizes, leanest, 1), device)


def explain_decision(estimator: Estimator, result: SearchResult) -> list[str]:
    """Return the reasons for the recommended plan, one sentence or two each."""
    copy = alone(estimator, result.task)
    return [
        whole_copy(estimator, copy, result.task),
        *_axes(estimator, result, fits=copy.fits(result.task.memory_share)),
        *_settings(result),
        *_tie(result),
    ]


def fewer_devices(task: PlanTask, best: Estimate, points: Sequence[ScalingPoint]) -> str:
    """Return that fewer devices are as fast as all, and how to plan for them; empty if not.

    Where the user has chosen sizes, that says nothing: other sizes may make all devices faster.
    """
    enough, fixed = enough_devices(points), task.fixed
    chosen = fixed.mesh or fixed.micro_batch_size or fixed.gradient_accumulation_steps
    if chosen or enough is None or enough.estimate is None:
        return ""
    own, whole = human_seconds(enough.estimate.time.step), human_seconds(best.time.step)
    are = "device is" if enough.num_devices == 1 else "devices are"
    slower = enough.estimate.time.step > best.time.step
    speed = "as fast as" if slower or own == whole else "faster than"
    not_whole = "" if own == whole else f" not {whole},"
    within = ", within the error of estimates" if slower and not_whole else ""
    return (
        f"{enough.num_devices} {are} {speed} all {task.hardware.count}{within}: {own} per step,"
        f"{not_whole} with the same global batch. {_plan_for(task, enough.estimate.hardware)}"
    )


def _plan_for(task: PlanTask, hardware: Hardware) -> str:
    """Say how to plan the same batch for fewer devices."""
    named = hardware.chip.name in load_chips()
    devices = (
        f"Write {Setting('hardware', str(hardware))}"
        if named
        else f"Use {counted(hardware.count, 'device')} with"
    )
    # By default, the batch depends on the number of devices.
    batch = Setting("training.global_batch_size", task.global_batch_size)
    return f"{devices} {batch}."


def whole_copy(estimator: Estimator, copy: Estimate, task: PlanTask) -> str:
    """Return whether a whole copy of the model can be trained on one device."""
    memory, parameters = copy.memory, max(1, estimator.num_parameters)
    # A gradient is as large as its parameter, even where not all of them are there at once.
    state = 2 * memory.parameters + memory.optimizer
    limit = human_bytes(task.memory_share * copy.capacity)
    verdict = "fits on one device" if copy.fits(task.memory_share) else "does not fit on one device"
    return (
        f"Training a whole copy of the model takes {human_bytes(memory.total)} at least, and "
        f"{verdict}, which has {limit} for it. Parameters, gradients and optimizer state are "
        f"{human_bytes(state)} of this: {state / parameters:.1f} bytes for each of "
        f"{parameters:,} parameters."
    )


def _axes(estimator: Estimator, result: SearchResult, *, fits: bool) -> Iterator[str]:
    plan = result.best.plan
    if not plan.mesh:
        yield "There is one device, so nothing is sharded."
    if plan.size("data") > 1:
        yield _data(result.best, fits=fits)
    for axis in (*MODEL_AXES, CONTEXT):
        if plan.size(axis) > 1:
            yield f"{does(estimator, plan, axis)}. {without(estimator, result, axis)}"


def does(estimator: Estimator, plan: Plan, axis: str) -> str:
    """Return what an axis of a plan does: how much it shards, if that is not all it could."""
    size, what = plan.size(axis), MESH_AXES[axis].does
    share = 1.0 if axis in (PIPE, CONTEXT) else estimator.sharded_share(plan, axis)
    if axis == "fsdp" and plan.sharding.zero < 3:
        what = f"shards {'gradients and ' if plan.sharding.zero == 2 else ''}optimizer state"
    if share < MOSTLY:
        state = "the parameters" if axis == "tensor" else what.removeprefix("shards ")
        amount = "nothing" if share < LEAST_SHARDED else f"{share:.0%}"
        what = f"shards {amount} of {state}, whose other dims it does not divide"
    return f"{axis}={size} {what}"


def _data(best: Estimate, *, fits: bool) -> str:
    plan = best.plan
    traffic = best.time.traffic.get("data")
    takes = "takes no time"
    if traffic is not None:
        exposed, whole = human_seconds(traffic.exposed_seconds), human_seconds(traffic.seconds)
        takes = (
            f"takes {whole}, of which {exposed} are not hidden behind computing"
            if traffic.exposed_seconds > 0.01 * traffic.seconds
            else f"takes {whole}, hidden behind computing"
        )
    groups = counted(plan.size("data"), "replica")
    if set(plan.mesh) == {"data"} and fits:
        return (
            f"So each device has its own copy and its own samples (data={plan.size('data')}), and "
            f"only gradients are sent: reducing them {takes}."
        )
    return (
        f"data={plan.size('data')}: {groups} train on different samples; reducing their gradients "
        f"{takes}."
    )


def without(estimator: Estimator, result: SearchResult, axis: str) -> str:
    """Return what happens without an axis: nothing fits, or how much slower the best mesh is."""
    if axis in result.task.fixed.mesh:
        return "You asked for it."
    other = _best_without(estimator, result, axis)
    if other is None:
        rejected = [each for each in result.rejected if each.mesh.get(axis, 1) == 1]
        return f"Without it, no mesh works: {_most_common(rejected)}." if rejected else ""
    mesh = describe_sizes(other.plan.mesh)
    if other.time.step <= result.best.time.step:
        return f"Without it, {mesh} takes as long."
    return f"Without it, the best mesh is {mesh}: {slower_because(other, result.best)}."


def _best_without(estimator: Estimator, result: SearchResult, axis: str) -> Estimate | None:
    """Return the best plan without an axis, of the meshes that may be fast; None if none fits."""
    others = [each for each in (*result.plans, *result.slower()) if each.plan.size(axis) == 1]
    others.sort(key=lambda estimate: estimate.time.step)
    if not others:
        return None
    meshes = [{name: each.plan.size(name) for name in AXES} for each in others[:LOOKED_AT]]
    return search(estimator, result.task, top=1, meshes=meshes).best


def _most_common(rejected: list[Rejection]) -> str:
    kinds = Counter(each.kind for each in rejected)
    kind = "memory" if kinds["memory"] else kinds.most_common(1)[0][0]
    return str(min((r for r in rejected if r.kind == kind), key=lambda each: each.distance))


def _settings(result: SearchResult) -> Iterator[str]:
    plan, fixed = result.best.plan, result.task.fixed
    batch, sharding = plan.batch, plan.sharding
    if sharding.remat != "none":
        why = "as you asked" if fixed.remat else "because memory would limit the microbatch more"
        yield (
            f"remat={sharding.remat}: the backward pass recomputes values instead of keeping "
            f"them, {why}."
        )
    steps = batch.gradient_accumulation_steps
    if steps > 1:
        reduced = "" if batch.sync_gradients_every == 1 else "; gradients are reduced once per step"
        yield (
            f"A step of {batch.global_batch_size} samples runs as {steps} microbatches of "
            f"{counted(batch.micro_batch_size, 'sample')} per replica{reduced}."
        )
    if plan.schedule:
        share = result.best.time.bubble / result.best.time.step
        yield (
            f"With {plan.schedule} and "
            f"{counted(plan.num_microbatches, 'microbatch')} for "
            f"{plan.size('pipe')} stages, devices wait {share:.1%} of the time for other stages."
        )


def _tie(result: SearchResult) -> Iterator[str]:
    best, fastest = result.best, min(result.plans, key=lambda estimate: estimate.time.step)
    gain = 1 - fastest.time.step / best.time.step
    if fastest is not best and gain > 0.0005:
        yield (
            f"{describe_sizes(fastest.plan.mesh)} is estimated {gain:.1%} faster, "
            f"{within_error(fastest, best)}, so the simpler plan is recommended."
        )


def reason_for(
    estimator: Estimator, result: SearchResult, estimate: Estimate, *, fits_alone: bool
) -> str:
    """Return in one sentence why a plan is recommended, or ranks where it does."""
    best, fixed = result.best, result.task.fixed.mesh
    if estimate is not best:
        return slower_because(estimate, best)
    mesh = estimate.plan.mesh
    if not mesh:
        return "the only device"
    if set(mesh) == {"data"}:
        faster = "as you asked" if "data" in fixed else "nothing is clearly faster"
        return f"data parallel: a whole copy fits on each device, and {faster}"
    fastest = all(each.time.step >= best.time.step for each in result.plans)
    speed = "and is fastest" if fastest else "and nothing simpler is as fast"
    cause = speed if fits_alone else "because a whole copy does not fit on one device"
    used = [axis for axis in MODEL_AXES if axis in mesh]
    if {*used, *({CONTEXT} & set(mesh))} <= set(fixed):
        cause = "as you asked"
    shards = " and ".join(does(estimator, estimate.plan, axis) for axis in used)
    if CONTEXT not in mesh:
        return f"{shards}, {cause}"
    rows = f"{does(estimator, estimate.plan, CONTEXT)}, and so their activations"
    return f"{shards}, {cause}; {rows}" if used else f"{rows}, {cause}"


class NothingFits(UserError):
    """No plan fits the devices; ``report`` has every mesh with its reason, as plain values."""

    exit_code = ExitCode.NOTHING_FITS

    def __init__(self, what: str, *, why: str, fix: str, report: dict[str, Any]) -> None:
        self.report = report
        super().__init__(what, why=why, fix=fix)


def nothing_fits(estimator: Estimator, result: SearchResult) -> NothingFits:
    """Return the error for a model that fits with no plan, and what would hold it."""
    task = result.task
    large = [each for each in result.rejected if each.kind == "memory"]
    nearest = min(large, key=lambda each: each.distance)
    half = _in_half(estimator, task)
    found = half or smallest_cluster(estimator, task)
    fits_here = found is not None and found.task.hardware.count <= task.hardware.count
    if not fits_here and _shares_memory(task.hardware):
        found = None
    report = {
        "hardware": str(task.hardware),
        "plans": [],
        "rejected": [each.to_json() for each in result.rejected],
        "smallest_hardware": found and str(found.task.hardware),
        "smallest_mesh": found and found.best.plan.mesh,
        "smallest_global_batch_size": found and found.task.global_batch_size,
    }
    return NothingFits(
        f"no plan fits on {task.hardware}{_divided_batch(task) if fits_here and not half else ''}",
        why=f"the nearest is {nearest}",
        fix=_what_holds_it(task, found),
        report=report,
    )


def _in_half(estimator: Estimator, task: PlanTask) -> SearchResult | None:
    """Return a search in half precision, whose attention stores no scores, if a plan then fits."""
    if task.precision != "no" or task.hardware.chip.platform == "cpu":
        return None
    result = search(estimator, replace(task, precision="bf16"), top=1)
    return result if result.plans else None


def _divided_batch(task: PlanTask) -> str:
    """Say that the batch does not divide, which leaves out meshes that fit; empty if it does."""
    count, batch = task.hardware.count, task.global_batch_size
    most = math.gcd(count, batch)
    if most == min(count, batch):
        return ""
    return f": {batch:,} samples per step can only be divided over {most} of {count} devices"


def _what_holds_it(task: PlanTask, found: SearchResult | None) -> str:
    """Return what to use for a model that does not fit, such as the cluster that was found."""
    chip = task.hardware.chip.name
    if found is None and _shares_memory(task.hardware):
        local = Setting("hardware", LOCAL)
        this = "" if task.hardware.chip.measured else f" ({local} plans with that of this machine)"
        return (
            f"{SHARED}; use a host with more memory{this}, or name other hardware, such as "
            f"{Setting('hardware', '8xH100')}"
        )
    if found is None:
        return f"no cluster of {chip} holds it; choose a chip with more memory"
    enough, plan = found.task.hardware, found.best.plan.describe()
    memory = human_bytes(found.best.memory.total)
    if found.task.precision != task.precision:
        return f"write {Setting('precision', found.task.precision)}: {plan}, {memory} per device"
    if enough.count > task.hardware.count:
        return (
            f"the smallest cluster of {chip} that holds it is {enough}: {plan}, {memory} per "
            f"device, {_batch_assumed(found, task)}"
        )
    changes = (
        ["leave the settings of mesh and microbatches out"] if task.fixed != FixedSettings() else []
    )
    if task.global_batch_size % task.hardware.count:
        near = multiples_around(task.global_batch_size, task.hardware.count)
        changes = [f"write {Setting('training.global_batch_size', *near)}", *changes]
    return f"{' and '.join([*changes, f'{enough} holds it'])}: {plan}"


def _shares_memory(hardware: Hardware) -> bool:
    """Whether all devices are those of one host, and use its memory."""
    return hardware.chip.topology == "shared_memory" and hardware.nodes == 1


def _batch_assumed(found: SearchResult, asked: PlanTask) -> str:
    """Say which batch the smallest cluster is for: one that can be divided over its devices."""
    batch = found.task.global_batch_size
    if batch == asked.global_batch_size:
        return f"for the same global batch of {counted(batch, 'sample')}"
    return (
        f"for a global batch of {batch} samples instead of {asked.global_batch_size}, which can be "
        f"divided over {found.task.hardware.count} devices"
    )
