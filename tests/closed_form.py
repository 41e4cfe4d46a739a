"""An estimator of transformers by arithmetic, for tests of searches that need no traced program."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.hardware import Hardware
from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import AxisTraffic, Estimate, MemoryEstimate, TimeEstimate
from meshwright.program.dims.sample_values import MixedSamplesError

RECOMPUTED = {"none": 0.0, "dots": 0.06, "full": 1 / 3}
SAVED = {"none": 34, "dots": 18, "full": 2}


@dataclass(frozen=True)
class ClosedForm:
    """A transformer of some blocks with adamw in float32 and products in 16 bits."""

    blocks: int = 24
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 50_304
    tokens: int = 1024
    has_rollouts = False

    @property
    def num_parameters(self) -> int:
        return 12 * self.blocks * self.hidden**2 + self.vocabulary * self.hidden

    @property
    def num_blocks(self) -> int:
        return self.blocks

    @property
    def tensor_sizes(self) -> frozenset[int]:
        return frozenset(size for size in range(1, 65) if self.heads % size == 0)

    @property
    def keeps_statistics(self) -> bool:
        return False

    @property
    def sample_mixing(self) -> MixedSamplesError | None:
        return None

    @property
    def tokens_per_sample(self) -> int:
        return self.tokens

    def row_obstacle(self, sizes: Mapping[str, int]) -> str:
        return "its rows stay whole"

    def sharded_share(self, plan: Plan, axis: str) -> float:
        return 1.0

    def estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        return Estimate(plan, hardware, self._time(plan, hardware), lambda: self._memory(plan))

    def bound(self, plan: Plan, hardware: Hardware) -> Estimate:
        return self.estimate(plan, hardware)

    def _memory(self, plan: Plan) -> MemoryEstimate:
        parts = plan.size("tensor") * plan.size("pipe")
        own = self.num_parameters / parts
        shard = int(own / plan.size("fsdp"))
        micro_tokens = plan.batch.micro_batch_size * self.tokens
        layers = self.blocks / plan.size("pipe") * min(plan.size("pipe"), plan.num_microbatches)
        once = plan.batch.gradient_accumulation_steps > 1 and plan.batch.sync_gradients_every > 1
        saved = SAVED[plan.sharding.remat] * layers * micro_tokens * self.hidden
        return MemoryEstimate(
            parameters=4 * shard,
            optimizer=8 * shard,
            gradients=int(4 * own) if once else 4 * shard,
            batch=4 * micro_tokens * plan.batch.gradient_accumulation_steps,
            gathered=int(24 * self.hidden**2 / plan.size("tensor")) if plan.size("fsdp") > 1 else 0,
            activations=int(saved / plan.size("tensor")),
            working=10**9 + int(6 * micro_tokens * self.vocabulary / plan.size("tensor")),
            all_gradients=int(4 * own) if once else 4 * shard,
        )

    def _time(self, plan: Plan, hardware: Hardware) -> TimeEstimate:
        chip, batch = hardware.chip, plan.batch
        tokens = batch.global_batch_size * self.tokens
        flops = 6.0 * self.num_parameters * tokens
        peak = chip.tflops_per_device * 1e12 * plan.num_devices
        rows = batch.micro_batch_size * self.tokens
        busy = 0.6 * rows / (rows + 512)
        compute = flops / (peak * busy) * (1 + RECOMPUTED[plan.sharding.remat])
        compute *= 1.02 if plan.sharding.blocks == "scan" else 1.0
        bubble = compute * (plan.size("pipe") - 1) / plan.num_microbatches
        bubble /= {"zb_h1": 3, "interleaved": plan.num_chunks}.get(plan.schedule or "", 1)
        return TimeEstimate(
            compute=compute,
            traffic=self._traffic(plan, hardware, compute),
            bubble=bubble,
            flops=flops,
            peak_flops=peak,
        )

    def _traffic(self, plan: Plan, hardware: Hardware, compute: float) -> dict[str, AxisTraffic]:
        own = self.num_parameters / plan.size("tensor") / plan.size("pipe")
        steps = plan.batch.gradient_accumulation_steps
        reductions = steps // plan.batch.sync_gradients_every
        rows = plan.batch.micro_batch_size * self.tokens
        layers = self.blocks / plan.size("pipe")
        sent = {
            "data": 2 * 4 * own / plan.size("fsdp") * reductions,
            "fsdp": 4 * own * steps + 4 * own * reductions,
            "tensor": 8 * 2 * rows * self.hidden * layers * steps,
            "pipe": 2 * 2 * rows * self.hidden * steps,
        }
        found: dict[str, AxisTraffic] = {}
        for axis, size in plan.mesh.items():
            nbytes = sent[axis] * (size - 1) / size
            seconds = nbytes / bandwidth(plan, hardware, axis)
            hidden = 0.0 if axis == "tensor" else 0.5 * compute
            found[axis] = AxisTraffic(nbytes, seconds, max(0.0, seconds - hidden))
        return found


def bandwidth(plan: Plan, hardware: Hardware, axis: str) -> float:
    """Return bytes per second over an axis, whose groups may span nodes."""
    order = ("tensor", "fsdp", "data", "pipe")
    span = math.prod(plan.size(each) for each in order[: order.index(axis) + 1])
    chip = hardware.chip
    if span <= hardware.devices_per_node:
        return 0.8e9 * chip.links_per_chip * chip.link_gb_per_s
    return 0.8e9 * (chip.inter_node_gb_per_s or 5)


GPT2_MEDIUM = ClosedForm()
GPT3 = ClosedForm(blocks=96, hidden=12288, heads=96, vocabulary=50_304, tokens=2048)
