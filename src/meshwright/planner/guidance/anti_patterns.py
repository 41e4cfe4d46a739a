"""Common mistakes in plans, by name, with the numbers of the plan that makes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.config.batch import microbatches_setting
from meshwright.config.microbatches import MICROBATCHES_PER_STAGE, multiples_around
from meshwright.errors import Setting
from meshwright.hardware import MEMORY_SHARE
from meshwright.mesh.axes import CONTEXT, MODEL_AXES, describe_sizes, divisors
from meshwright.plan import TINY_SHARD, Plan
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import LONG_ROWS
from meshwright.planner.search.obstacles import crosses_nodes, speeds
from meshwright.planner.search.what_if import ScalingPoint, enough_devices
from meshwright.step.loss_warnings import no_mean_text
from meshwright.text.units import counted, human_bytes, human_seconds

NOTABLE = 0.1
"""Waiting is mentioned from this share of a step."""


SLOW_FSDP, TENSOR_ACROSS = "fsdp over a slow network", "tensor parallelism across nodes"
OVER_SHARDING, SHORT_ROWS = "over-sharding", "dividing short rows"
OF_MESHES = frozenset({SLOW_FSDP, TENSOR_ACROSS, OVER_SHARDING, SHORT_ROWS})
"""Mistakes of a mesh that was chosen by hand: a search has compared it with those advised."""

_ROLLOUTS = (
    "times are those of updates alone; completing prompts, rewards and log-probabilities come on "
    "top, and usually take as long again or longer"
)


@dataclass(frozen=True)
class AntiPattern:
    """A common mistake: its name, what it costs in this plan, and what to do instead."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def find_anti_patterns(
    estimator: Estimator, estimate: Estimate, better: Estimate | None, share: float = MEMORY_SHARE
) -> list[AntiPattern]:
    """Return the mistakes of a plan, compared with the best one that is known if it is another."""
    found = {
        "a batch that does not divide": _uneven_batch(estimate),
        "replicating a model that does not fit": _replicated(estimate, share),
        "forgetting optimizer state": _forgotten_state(estimate, share),
        SLOW_FSDP: _slow_fsdp(estimate),
        TENSOR_ACROSS: _tensor_across(estimate),
        "tensor parallelism where data parallelism fits": _tensor_for_nothing(estimate, better),
        "too few microbatches for the stages": _few_microbatches(estimate),
        "statistics of microbatches": _divided_statistics(estimator, estimate),
        "comparisons within microbatches": _divided_comparisons(estimator, estimate),
        OVER_SHARDING: _over_sharded(estimator, estimate),
        SHORT_ROWS: _short_rows(estimator, estimate),
        "taking an update for a step": _ROLLOUTS if estimator.has_rollouts else "",
    }
    return [AntiPattern(name, text) for name, text in found.items() if text]


def _replicated(estimate: Estimate, share: float) -> str:
    whole = all(estimate.plan.size(axis) == 1 for axis in MODEL_AXES)
    if not whole or estimate.fits(share):
        return ""
    return (
        f"each device needs {human_bytes(estimate.memory.total)} and has "
        f"{human_bytes(estimate.capacity)}; more devices do not change that. Shard it: "
        f"{Setting('mesh.fsdp', estimate.plan.num_devices)}"
    )


def _forgotten_state(estimate: Estimate, share: float) -> str:
    """Return what is forgotten if only weights are counted, and only they fit."""
    memory, room = estimate.memory, share * estimate.capacity
    if estimate.fits(share) or memory.parameters > room or memory.least <= room:
        return ""
    return (
        f"the parameters alone would fit, with {human_bytes(memory.parameters)} per device; "
        f"training also needs {human_bytes(memory.all_gradients)} of gradients and "
        f"{human_bytes(memory.optimizer)} for the optimizer, before any activations"
    )


def _slow_fsdp(estimate: Estimate) -> str:
    plan, traffic = estimate.plan, estimate.time.traffic.get("fsdp")
    spans = crosses_nodes(estimate.hardware, plan.size("fsdp") * plan.size("tensor"))
    if traffic is None or not spans or traffic.exposed_seconds < NOTABLE * estimate.time.step:
        return ""
    inside = math.gcd(
        estimate.hardware.devices_per_node
        // math.gcd(estimate.hardware.devices_per_node, plan.size("tensor")),
        plan.size("fsdp"),
    )
    return (
        f"fsdp={plan.size('fsdp')} crosses nodes, and devices wait "
        f"{human_seconds(traffic.exposed_seconds)} of {human_seconds(estimate.time.step)} for "
        f"weights over {speeds(estimate.hardware)}. Compare with fsdp inside a node: "
        f"{Setting('mesh.fsdp', inside)}, and data or pipe for the rest"
    )


def _tensor_across(estimate: Estimate) -> str:
    size, traffic = estimate.plan.size("tensor"), estimate.time.traffic.get("tensor")
    if traffic is None or not crosses_nodes(estimate.hardware, size):
        return ""
    return (
        f"tensor={size} spans nodes of {estimate.hardware.devices_per_node}: "
        f"{human_seconds(traffic.exposed_seconds)} of {human_seconds(estimate.time.step)} per "
        f"step wait for {speeds(estimate.hardware)}"
    )


def _tensor_for_nothing(estimate: Estimate, better: Estimate | None) -> str:
    if estimate.plan.size("tensor") == 1 or better is None or better.plan.size("tensor") > 1:
        return ""
    extra = estimate.time.step / better.time.step - 1
    if extra <= 0 or better.plan.size("pipe") > 1:
        return ""
    return (
        f"{describe_sizes(better.plan.mesh)} fits without it and is faster: tensor="
        f"{estimate.plan.size('tensor')} costs {extra:.1%} more"
    )


def _short_rows(estimator: Estimator, estimate: Estimate) -> str:
    size, tokens = estimate.plan.size(CONTEXT), estimator.tokens_per_sample
    if size == 1 or tokens >= LONG_ROWS:
        return ""
    return (
        f"context={size} divides rows of {tokens:,} tokens, and each attention waits for an "
        f"exchange. From {LONG_ROWS:,} tokens it pays; here fsdp or data would send less: "
        f"{Setting('mesh.context', 1)}"
    )


def _few_microbatches(estimate: Estimate) -> str:
    plan, time = estimate.plan, estimate.time
    stages = plan.size("pipe")
    enough = MICROBATCHES_PER_STAGE * stages
    if stages == 1 or plan.num_microbatches >= enough or time.bubble < NOTABLE * time.step:
        return ""
    return (
        f"{counted(plan.num_microbatches, 'microbatch')} for {stages} stages: "
        "devices wait "
        f"{time.bubble / time.step:.0%} of the time. {_more_microbatches(plan, enough)}"
    )


def _more_microbatches(plan: Plan, enough: int) -> str:
    """Say how to get enough microbatches, or as many as the batch can be divided into."""
    batch = plan.batch
    own = batch.global_batch_size // batch.replicas
    group = plan.size("pipe") if plan.num_chunks > 1 else 1
    more = [n for n in divisors(own) if n > plan.num_microbatches and n % group == 0]
    if not more:
        whole = batch.micro_batch_size * batch.replicas * enough
        return f"{Setting('training.global_batch_size', whole)} has enough samples for {enough}"
    count = next((count for count in more if count >= enough), more[-1])
    setting = microbatches_setting(own // count, count)
    if plan.num_microbatches < batch.gradient_accumulation_steps:
        setting += f" {Setting('pipeline.num_microbatches', count)}"
    return f"Use {count}: {setting}"


def _divided_statistics(estimator: Estimator, estimate: Estimate) -> str:
    """Return what microbatches change for models whose statistics depend on the batch."""
    batch = estimate.plan.batch
    if not estimator.keeps_statistics or batch.gradient_accumulation_steps == 1:
        return ""
    return (
        "the model keeps statistics of samples, as BatchNorm does: they see the "
        f"{batch.micro_batch_size * batch.replicas} samples of a microbatch, not the "
        f"{batch.global_batch_size} of a step, so that training differs. "
        f"{Setting('training.gradient_accumulation_steps', 1)} avoids that, if it fits"
    )


def _divided_comparisons(estimator: Estimator, estimate: Estimate) -> str:
    """Return what microbatches change for losses that compare samples, as contrastive ones do."""
    mixing, divided = estimator.sample_mixing, estimate.plan.batch.gradient_accumulation_steps > 1
    # What keeps statistics also mixes samples, and is named by itself.
    if not divided or estimator.keeps_statistics or mixing is None or not mixing.combines:
        return ""
    return no_mean_text(mixing, estimate.plan)


def _uneven_batch(estimate: Estimate) -> str:
    """Return what it costs that the devices cannot divide the batch evenly."""
    devices, samples = estimate.plan.num_devices, estimate.plan.batch.global_batch_size
    most = math.gcd(devices, samples)
    if most == min(devices, samples) or estimate.plan.batch.replicas < most:
        return ""
    even = Setting("training.global_batch_size", *multiples_around(samples, devices))
    return (
        f"{samples:,} samples can be divided over {most} of {devices} devices, so that the others "
        f"have to shard the model; {even} could be divided over all"
    )


def _over_sharded(estimator: Estimator, estimate: Estimate) -> str:
    plan, time = estimate.plan, estimate.time
    parts = math.prod(plan.size(axis) for axis in MODEL_AXES)
    own = estimator.num_parameters // parts
    if parts == 1 or own >= TINY_SHARD or time.exposed < NOTABLE * time.step:
        return ""
    return (
        f"{parts} devices share {estimator.num_parameters:,} parameters, {own:,} each, and wait "
        f"{time.exposed / time.step:.0%} of the time for each other. A copy on each device sends "
        f"less: compare with {Setting('mesh.data', plan.num_devices)}, and see how speed grows "
        "with the number of devices"
    )


def linear_scaling(points: Sequence[ScalingPoint]) -> AntiPattern | None:
    """Return how far all devices are from linear scaling; None if close, or fewer are as fast."""
    known = [point for point in points if point.estimate is not None]
    if len(known) < 2 or known[-1].efficiency > 0.95 or enough_devices(points):
        return None
    first, last = known[0], known[-1]
    factor = last.num_devices // first.num_devices
    return AntiPattern(
        "assuming linear scaling",
        f"{factor} times the devices are {last.efficiency * factor:.1f} times as fast, not "
        f"{factor}: {last.efficiency:.0%} of the speed per device",
    )
