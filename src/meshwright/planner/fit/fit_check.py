"""Whether a step can fit into memory: what it needs at least, checked before it is compiled."""

from collections.abc import Callable, Iterator

import jax

from meshwright.compiled.memory import MemoryUse
from meshwright.errors import OutOfMemory, Setting
from meshwright.hardware import detect
from meshwright.plan import Plan
from meshwright.planner.devices.local_hardware import SHARED, Capacity, device_capacity
from meshwright.planner.estimate.estimate import MemoryEstimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.fit.remedies import shard_further
from meshwright.sharding.decide import decide
from meshwright.step.assemble import Assembled
from meshwright.text.units import human_bytes
from meshwright.trees import bytes_on_device

PREDICTED_FROM = 0.25
"""The part of a device's memory from which the exact bytes of a step make a prediction worth its
seconds: the model is traced for it once more, while every run waits to start."""


def least_memory(assembled: Assembled) -> MemoryEstimate:
    """Return what a step needs before it computes anything, from the placement of every leaf."""
    step, layout = assembled.step, assembled.traced.layout
    state = step.abstract_state
    # Gradients must all be finite before the first parameter changes, or they are added up.
    together = state.halted is not None or assembled.plan.batch.gradient_accumulation_steps > 1
    placed = zip(layout.step_leaves, assembled.decision.gradients, strict=True)
    gradients = sum(
        step.leaf.nbytes // place.shards(assembled.mesh.shape)
        for step, place in placed
        if step.leaf.role == "param"
    )
    return MemoryEstimate(
        parameters=bytes_on_device([state.params, state.model_state]),
        optimizer=bytes_on_device(state.optimizer),
        gradients=gradients if together else 0,
        batch=bytes_on_device(batch_shapes(assembled)),
    )


def list_memory(memory: MemoryEstimate) -> str:
    """Return what a step needs before it computes anything, part by part."""
    named = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "gradients": memory.gradients,
        "batch": memory.batch,
    }
    return " + ".join(f"{human_bytes(n)} of {what}" for what, n in named.items() if n)


def batch_shapes(assembled: Assembled) -> list[jax.ShapeDtypeStruct]:
    """Return the leaves of a global batch as shapes on the mesh."""
    size, sharding = assembled.plan.batch.global_batch_size, assembled.step.shardings.batch
    return [
        jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype, sharding=sharding)
        for leaf in assembled.traced.batch
    ]


def check_memory(
    assembled: Assembled,
    make_estimator: Callable[[], Estimator] | None = None,
    capacity: Capacity | None = None,
) -> list[str]:
    """Refuse a step whose state, gradients and batch alone exceed a device's memory.

    Return a warning if the estimator predicts more than there is. It is not asked on CPUs, whose
    devices share the memory of the host with everything else, nor where state, gradients and batch
    are small (`PREDICTED_FROM`).
    """
    capacity = capacity or device_capacity(assembled.mesh.local_devices)
    if capacity is None:
        return []
    least = least_memory(assembled)
    if least.total > capacity.bytes:
        raise OutOfMemory(
            f"the plan does not fit: a step needs at least {human_bytes(least.total)} per device, "
            f"and each has {human_bytes(capacity.bytes)}",
            why=f"{list_memory(least)}, before anything is computed; a device has {capacity}",
            fix=next(_changes(assembled, least, capacity), _what_holds_it(capacity)),
        )
    on_cpu = assembled.mesh.devices.flat[0].platform == "cpu"
    small = least.total < PREDICTED_FROM * capacity.bytes
    if make_estimator is None or on_cpu or small:
        return []
    return _warn(assembled, capacity, make_estimator)


def warn_of_compiled(assembled: Assembled, memory: MemoryUse | None) -> list[str]:
    """Return a warning if a compiled step needs more memory than a device has, if that is known."""
    capacity = device_capacity(assembled.mesh.local_devices)
    if memory is None or capacity is None:
        return []
    return _exceeding("the compiled step needs", memory.total, capacity)


def _what_holds_it(capacity: Capacity) -> str:
    """Return what to use for a step that no change makes small enough."""
    if not capacity.shared:
        return "use a smaller model, or devices with more memory"
    return (
        f"{SHARED}; use a smaller model or a host with more memory, or plan for other hardware: "
        f"`meshwright plan` with {Setting('hardware', '8xH100')}"
    )


def _warn(
    assembled: Assembled, capacity: Capacity, make_estimator: Callable[[], Estimator]
) -> list[str]:
    hardware = detect(list(assembled.mesh.devices.flat))
    if hardware is None:
        return []
    try:
        needs = make_estimator().estimate(assembled.plan, hardware).memory.total
    except Exception as error:
        # Whatever a prediction fails on, the run itself may not.
        return [f"how much memory a step needs could not be predicted: {error}"]
    return _exceeding("a step is predicted to need", needs, capacity)


def _exceeding(what: str, needs: int, capacity: Capacity) -> list[str]:
    if needs <= capacity.bytes:
        return []
    return [
        f"{what} {human_bytes(needs)} per device, and each has {capacity}; "
        "`meshwright plan` finds settings that fit"
    ]


def _changes(assembled: Assembled, least: MemoryEstimate, capacity: Capacity) -> Iterator[str]:
    """Yield changes that would fit, the smallest first, with what they need at least."""
    if assembled.plan.size("pipe") > 1:
        # How other stages shard the leaves is only known once the model is cut again.
        return
    for remedy in shard_further(assembled.plan, more_devices=not capacity.shared):
        needs = _bytes_on(assembled, remedy.plan, least)
        if needs <= capacity.bytes:
            yield f"write {remedy.text}, which needs at least {human_bytes(needs)} per device"


def _bytes_on(assembled: Assembled, plan: Plan, least: MemoryEstimate) -> int:
    """Return what another mesh of fsdp and tensor would need at least, with as large a batch."""
    sizes, decision = plan.mesh, decide(assembled.traced, plan.mesh, plan.sharding)
    leaves = assembled.traced.layout.step_leaves
    params = assembled.traced.layout.numbers("param")
    total = least.batch
    for number, step in enumerate(leaves):
        total += step.leaf.nbytes // decision.at_rest[number].shards(sizes)
        if least.gradients and step.leaf.role == "param":
            total += step.leaf.nbytes // decision.gradients[number].shards(sizes)
    for leaf in assembled.step.optimizer.leaves:
        owner = -1 if leaf.param is None else params[leaf.param]
        same = owner >= 0 and leaf.shape == leaves[owner].leaf.shape
        total += leaf.nbytes // (decision.optimizer[owner].shards(sizes) if same else 1)
    return total
