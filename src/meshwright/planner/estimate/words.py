"""Estimates in words: what takes memory, what takes time, and why one plan is slower."""

from collections.abc import Mapping

from meshwright.mesh.axes import MESH_AXES, describe_sizes
from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import TIE, Estimate, MemoryEstimate
from meshwright.text.units import counted, human_bytes, human_seconds

CATEGORIES = (
    "parameters", "optimizer", "gradients", "batch", "gathered", "activations", "working",
    "reserved", "reference", "rollout"
)  # fmt: skip
"""What memory is used for, in the order of drawings."""

_SENT_OVER = "communication over "
"""Begins the name of time that a mesh axis takes: what computing does not hide."""


def memory_parts(memory: MemoryEstimate) -> dict[str, int]:
    """Return bytes by what they are used for."""
    return {name: getattr(memory, name) for name in CATEGORIES}


def time_parts(estimate: Estimate) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on."""
    time = estimate.time
    sent = {f"{_SENT_OVER}{axis}": own.exposed_seconds for axis, own in time.traffic.items()}
    stages = {"overhead of stages": time.staging, "pipeline bubble": time.bubble}
    return {"computing": time.compute, **sent, **stages}


def kind_of_mesh(mesh: Mapping[str, int]) -> str:
    """Return what a mesh does: ``fully sharded and tensor parallel``; empty for one device."""
    names = [axis.kind for axis in MESH_AXES.values() if axis.name in mesh]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def short_plan(plan: Plan) -> str:
    """Return a plan in a few words, without what is usual."""
    return ", ".join(filter(None, [describe_sizes(plan.mesh), settings_of(plan)]))


def settings_of(plan: Plan) -> str:
    """Return the settings of a plan besides its mesh that are not the usual ones."""
    sharding = plan.sharding
    parts = [
        microbatches_of(plan) if plan.batch.gradient_accumulation_steps > 1 else "",
        f"remat {sharding.remat}" if sharding.remat != "none" else "",
        "scan" if sharding.blocks == "scan" else "",
        f"{plan.schedule}" if plan.schedule else "",
    ]
    return ", ".join(filter(None, parts))


def microbatches_of(plan: Plan) -> str:
    """Return how many microbatches a replica runs per step: ``4 microbatches of 2 samples``."""
    batch = plan.batch
    count = counted(batch.gradient_accumulation_steps, "microbatch")
    return f"{count} of {counted(batch.micro_batch_size, 'sample')}"


def too_large(estimate: Estimate, share: float) -> str:
    """Return by how much a plan does not fit, and which bytes those are."""
    memory = estimate.memory
    parts = sorted(memory_parts(memory).items(), key=lambda part: -part[1])
    largest = ", ".join(f"{human_bytes(size)} {name}" for name, size in parts[:3] if size)
    return (
        f"does not fit: {room(memory.total, estimate.capacity, share)}, with the settings that "
        f"need least ({_leanest_words(estimate.plan)}); mostly {largest}"
    )


def room(needs: int, capacity: int, share: float) -> str:
    """Return bytes compared with the share of a device's memory that they may take."""
    limit = share * capacity
    over = f", {human_bytes(needs - limit)} too much" if needs > limit else ""
    return f"{human_bytes(needs)} of {human_bytes(limit)} ({share:.0%} of a device){over}"


def _leanest_words(plan: Plan) -> str:
    batch = plan.batch
    samples = (
        microbatches_of(plan)
        if batch.gradient_accumulation_steps > 1
        # Several microbatches would add up their gradients, which takes memory, too.
        else f"{counted(batch.micro_batch_size, 'sample')} per device, at once"
    )
    remat = f", remat {plan.sharding.remat}" if plan.sharding.remat != "none" else ""
    return f"{samples}{remat}"


def slower_because(other: Estimate, best: Estimate, *, at_least: bool = False) -> str:
    """Return how much slower a plan is than the best one, and on what it spends the time."""
    ratio, text = other.time.step / best.time.step - 1, _more_time(other, best)
    name = describe_sizes(best.plan.mesh)
    if ratio < 0.0005:
        if at_least:
            return f"slower than {name} with each microbatch and remat that fits"
        if ratio > -0.0005:
            return f"as fast as {name}, but less simple"
        return f"{-ratio:.1%} faster than {name}, {within_error(other, best)}, but less simple"
    bound = "at least " if at_least else ""
    percent = f"{ratio:.0%}" if ratio >= 0.095 else f"{ratio:.1%}"
    own, usual = human_seconds(other.time.step), human_seconds(best.time.step)
    times = f" ({bound}{own} per step, not {usual})" if own != usual else ""
    return f"{bound}{percent} slower than {name}{times}" + (f": {text}" if text else "")


def within_error(fast: Estimate, slow: Estimate) -> str:
    """Return why a plan that is estimated to be faster is no better."""
    if slow.time.step <= (1 + TIE) * fast.time.step:
        return "within the error of estimates"
    return "by less than the host takes for a step"


def slower_by_memory(bound: Estimate, best: Estimate, share: float) -> str:
    """Return why a mesh is slower than the best: its fastest plan, ``bound``, does not fit."""
    name, limit = describe_sizes(best.plan.mesh), human_bytes(share * bound.capacity)
    need = (
        f"its fastest settings need {human_bytes(bound.memory.total)} of {limit}, and those "
        "that fit take longer"
    )
    if bound.time.step <= best.time.step:
        return f"slower than {name} ({human_seconds(best.time.step)} per step): {need}"
    return f"{slower_because(bound, best, at_least=True)}; {need}"


def _more_time(slow: Estimate, fast: Estimate) -> str:
    """Return what the slower plan spends more time on."""
    usual = time_parts(fast)
    more = {name: own - usual.get(name, 0.0) for name, own in time_parts(slow).items()}
    causes = sorted((item for item in more.items() if item[1] > 0), key=lambda item: -item[1])
    notable = [item for item in causes if item[1] > 0.1 * sum(seconds for _, seconds in causes)]
    return ", ".join(f"{human_seconds(seconds)} more {_CAUSES[name]}" for name, seconds in notable)


_CAUSES = {
    **{f"{_SENT_OVER}{axis.name}": f"of exposed {axis.sends}" for axis in MESH_AXES.values()},
    "computing": "computing",
    "overhead of stages": "of what Meshwright's stages add to computing",
    "pipeline bubble": "waiting in the pipeline",
}


def compare_plans(one: Estimate, other: Estimate) -> str:
    """Return how another plan differs from the first in time and memory, and why."""
    first, second = short_plan(one.plan), short_plan(other.plan)
    before, after = one.time.step, other.time.step
    memory = f"{human_bytes(other.memory.total)} per device"
    need = f"It needs {memory}, not {human_bytes(one.memory.total)}."
    if abs(after / before - 1) < 0.0005:
        return f"{second} takes as long as {first}, {human_seconds(before)} per step. {need}"
    slow, fast = (other, one) if after > before else (one, other)
    times = f"{human_seconds(after)} per step, not {human_seconds(before)}"
    causes = _more_time(slow, fast)
    if slow is other:
        why = f": {causes}" if causes else ""
        return f"{second} costs {after / before - 1:.1%} more than {first} ({times}){why}. {need}"
    why = f"; {first} spends {causes}" if causes else ""
    return f"{second} costs {1 - after / before:.1%} less than {first} ({times}){why}. {need}"
