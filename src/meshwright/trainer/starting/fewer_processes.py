"""Plans for the remaining processes: the same samples on the nearest smaller mesh.

`meshwright launch --min-procs` and `--min-nodes` continue without processes that do not come back.
Every process then plans for all devices first, and shrinks that plan to the devices there are.
The launcher learns which numbers of processes have a mesh, so that it can choose one.
"""

import math
from collections.abc import Callable

from meshwright.config.batch import solve_batch
from meshwright.errors import UserError
from meshwright.mesh.axes import CONTEXT, PIPE, TENSOR, describe_sizes
from meshwright.plan import Plan
from meshwright.processes import process_count
from meshwright.runtime.attempts import Fit, ProcessRange
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.text.units import counted


def plan_for_remaining(
    make: Callable[[int], Plan], num_devices: int, *, keep_micro: bool = False
) -> Plan:
    """Return the plan for the devices there are; without some processes, the shrunken one."""
    allowed = ProcessRange.from_environment()
    if allowed is None:
        return make(num_devices)
    each, now = num_devices // process_count(), process_count()
    full = make(all_devices(num_devices))
    plans, fits = _plans(full, allowed, each, keep_micro=keep_micro)
    own_heartbeat().report(fits=fits)
    if now in plans:
        return plans[now]
    raise UserError(
        f"{now} of {allowed.full} processes cannot continue: {fits[now].problem}",
        why=f"the run is planned as {full.describe()}",
        fix="start all processes again, or choose a global batch size with more divisors",
    )


def all_devices(num_devices: int) -> int:
    """Return how many devices there would be with all processes, of which some may be missing."""
    allowed = ProcessRange.from_environment()
    return num_devices if allowed is None else num_devices // process_count() * allowed.full


def _plans(
    full: Plan, allowed: ProcessRange, each: int, *, keep_micro: bool
) -> tuple[dict[int, Plan], dict[int, Fit]]:
    """Return the plans of numbers of processes, and for each number whether it has one."""
    plans, fits, best = dict[int, Plan](), dict[int, Fit](), 0
    for count in reversed(allowed.counts):
        try:
            plan = shrink_plan(full, each * count, keep_micro=keep_micro)
        except UserError as error:
            fits[count] = Fit(problem=error.what)
            continue
        fsdp = plan.size("fsdp")
        if best and fsdp < plans[best].size("fsdp"):
            # Parameters that need more memory on more devices may not fit at all.
            fits[count] = Fit(
                problem=f"it would shard parameters over {counted(fsdp, 'device')}, and "
                f"{counted(best, 'process')} over {plans[best].size('fsdp')}"
            )
            continue
        plans[count], fits[count], best = plan, Fit(mesh=describe_sizes(plan.mesh)), count
    return plans, fits


def shrink_plan(plan: Plan, num_devices: int, *, keep_micro: bool = False) -> Plan:
    """Return a plan for fewer devices, with the same samples in each step.

    Tensor and pipe keep their sizes. Data shrinks first, then fsdp, to one of its divisors. A
    step keeps its number of microbatches, so that dropout and batch statistics stay the same and
    each device gets more samples; with ``keep_micro``, it gets more microbatches instead.
    """
    if num_devices == plan.num_devices:
        return plan
    kept = [TENSOR, PIPE, *([CONTEXT] if plan.size(CONTEXT) > 1 else [])]
    fixed, old = math.prod(map(plan.size, kept)), plan.batch
    replicas, rest = divmod(num_devices, fixed)
    if rest or not replicas:
        raise UserError(
            f"{counted(num_devices, 'device')} cannot be divided into groups of {fixed} "
            f"({' × '.join(kept)})"
        )
    if old.global_batch_size % replicas:
        raise UserError(
            f"a global batch of {counted(old.global_batch_size, 'sample')} cannot be divided over "
            f"{counted(replicas, 'replica')} (data × fsdp)"
        )
    # A divisor of the old size, so that parameters can still be sharded evenly.
    fsdp = math.gcd(replicas, plan.size("fsdp"))
    mesh = {**plan.mesh, "data": replicas // fsdp, "fsdp": fsdp}
    own = old.global_batch_size // replicas
    fewest = -(-own // old.micro_batch_size) if keep_micro else old.gradient_accumulation_steps
    counts = [count for count in range(fewest, own + 1) if own % count == 0]
    if not counts:
        raise UserError(
            f"the {counted(own, 'sample')} of each of {counted(replicas, 'replica')} cannot be "
            f"divided into {counted(fewest, 'microbatch')}"
        )
    problem: UserError | None = None
    for count in counts:
        try:
            return _with_microbatches(plan, mesh, replicas, count)
        except UserError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _with_microbatches(plan: Plan, mesh: dict[str, int], replicas: int, count: int) -> Plan:
    """Return the plan on another mesh with this many microbatches in a step."""
    old = plan.batch
    # What was done once per step, or flushed with it, still is.
    once = old.sync_gradients_every == old.gradient_accumulation_steps > 1
    whole = plan.num_microbatches == old.gradient_accumulation_steps and plan.size("pipe") > 1
    batch = solve_batch(
        replicas=replicas,
        global_batch_size=old.global_batch_size,
        gradient_accumulation_steps=count,
        sync_gradients_every=count if once else old.sync_gradients_every,
    )
    flushed = count if whole else plan.num_microbatches
    return Plan.parse({**dict(plan), "mesh": mesh, "batch": batch, "num_microbatches": flushed})


def fewer_processes_note(plan: Plan) -> str:
    """Return how many processes a run continues with, and how; empty if none is missing."""
    allowed, now = ProcessRange.from_environment(), process_count()
    if allowed is None or now == allowed.full:
        return ""
    batch = plan.batch
    return (
        f"continuing with {now} of {allowed.full} processes on {describe_sizes(plan.mesh)}; the "
        f"samples stay the same: {batch.global_batch_size} = {batch.micro_batch_size} per device × "
        f"{counted(batch.replicas, 'replica')} × "
        f"{counted(batch.gradient_accumulation_steps, 'microbatch')}"
    )
