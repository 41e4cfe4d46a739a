"""What pipeline stages keep: the parts of a program that stages divide, and their slots."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.pipeline.execute import tick_rows
from meshwright.pipeline.execute.least_saved import least_saved
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.planner.workload.array_operations import Array
from meshwright.planner.workload.in_memory import span_of
from meshwright.planner.workload.kernel_schedule import Kernel
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.program.jaxpr.equations import aval_of, scan_counts


@dataclass(frozen=True)
class BlockParts:
    """The repeated blocks of a scheduled program.

    ``backward`` is the first and the last moment of the loop that computes their gradients;
    ``saved`` are arrays of one block for its backward pass, ``carried`` those for the next block.
    """

    forward: Kernel
    backward: tuple[int, int]
    saved: tuple[Array, ...]
    carried: tuple[Array, ...]


@dataclass(frozen=True)
class SlotCounts:
    """How many values a stage keeps at most, by what they are.

    Saved values and cuts, for weight gradients that are still to be computed, are those of
    microbatches; carried are activations and gradients that arrived, messages those that it sends.
    """

    saved: int
    carried: int
    cuts: int
    messages: int


def find_blocks(kernels: Sequence[Kernel]) -> BlockParts | None:
    """Return the loop over blocks with the most to save; None without one."""
    scans = [k for k in kernels if k.operation.name == "scan"]
    loops = [k for k in scans if not k.operation.backward and k.times > 1 and k.operation.bodies]
    if not loops:
        return None
    forward = max(loops, key=lambda k: sum(a.nbytes for a in k.writes))
    back = [k for k in scans if k.operation.backward and k.times == forward.times]
    backward = max(back, key=lambda k: sum(a.nbytes for a, _ in k.reads), default=forward)
    operation = forward.operation
    consts, carries = scan_counts(operation.eqn)
    body = operation.bodies[0]
    traced = body.traced
    inputs = [
        variable
        for variable, array in zip(traced.jaxpr.invars, body.inputs, strict=True)
        if not array.of_weights
    ]
    wanted = [v for v in traced.jaxpr.outvars[carries:] if v in traced.values]
    saved = least_saved(traced.jaxpr.eqns, inputs[consts:] or inputs, wanted)
    arrays = tuple(Array(traced.dims(v), aval_of(v).dtype.itemsize) for v in saved)
    carried = tuple(body.inputs[consts : consts + carries])
    return BlockParts(forward, span_of(kernels, backward), arrays, carried)


def nbytes_of(arrays: Sequence[Array], sizes: DeviceSizes) -> float:
    """Return the bytes of some arrays on one device."""
    return sum(map(sizes.of, arrays))


def saved_by_iteration(loop: Kernel, sizes: DeviceSizes) -> float:
    """Return the bytes that one iteration of a loop adds to what it has saved."""
    carries = scan_counts(loop.operation.eqn)[1]
    carried = {id(array) for array in loop.operation.writes[:carries]}
    saved = [array for array in loop.writes if id(array) not in carried]
    return nbytes_of(saved, sizes) / loop.times


def count_slots(schedule: str, num_chunks: int, microbatches: int, stages: int) -> SlotCounts:
    """Return what the stages of a schedule keep and send."""
    # More microbatches than this repeat the same pattern and need no further slots.
    shown = microbatches if schedule == "gpipe" else min(microbatches, 2 * stages)
    found = _count_slots(schedule, num_chunks, shown, stages)
    if shown == microbatches:
        return found
    # As many microbatches as stages are what schedules repeat.
    fewer = _count_slots(schedule, num_chunks, shown - stages, stages)
    more = (found.messages - fewer.messages) * (microbatches - shown) / stages
    return replace(found, messages=found.messages + round(more))


@lru_cache(maxsize=4096)
def _count_slots(schedule: str, num_chunks: int, microbatches: int, stages: int) -> SlotCounts:
    needed = tick_rows.count_slots(get_schedule(schedule, num_chunks).table(microbatches, stages))
    carried = needed.num_activations + needed.num_gradients
    sent = needed.activation_ticks, needed.gradient_ticks
    # The first of two stages only sends activations, and the other one gradients.
    one_way = stages == 2 and num_chunks == 1
    messages = max(sent) if one_way else sum(sent)
    return SlotCounts(needed.num_saved, carried, needed.num_cuts, messages)


@lru_cache(maxsize=4096)
def share_of_waiting(schedule: str, num_chunks: int, microbatches: int, stages: int) -> float:
    """Return the share of the time in which the stages of a schedule wait for each other."""
    return float(get_schedule(schedule, num_chunks).bubble(microbatches, stages))
