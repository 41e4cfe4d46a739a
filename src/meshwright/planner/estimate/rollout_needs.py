"""What learning from rewards needs besides a step: cached rows, gathered weights, a reference."""

import math
from dataclasses import dataclass, replace

from meshwright.mesh.axes import ROW_AXES, TENSOR
from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import MemoryEstimate
from meshwright.planner.estimate.model_states import PlacedState


@dataclass(frozen=True)
class RolloutNeeds:
    """What rollouts need: the bytes of a row's cache and logits, and whether there is a reference.

    ``rows`` are generated at a time; None for all of a batch.
    """

    row_bytes: int
    rows: int | None
    reference: bool

    def on_device(self, plan: Plan, state: PlacedState) -> int:
        """Return the bytes on a device while completions are generated, besides the state."""
        rows = min(self.rows or plan.batch.global_batch_size, plan.batch.global_batch_size)
        rows = math.ceil(rows / math.prod(plan.size(axis) for axis in ROW_AXES))
        # Batches are filled up to a power of two; heads, and with them the cache, are divided.
        cache = 2 ** math.ceil(math.log2(rows)) * self.row_bytes / plan.size(TENSOR)
        same = plan.precision == "no" and state.generating <= state.parameters
        return round(cache + (0 if same else state.generating))

    def added_to(self, memory: MemoryEstimate, plan: Plan, state: PlacedState) -> MemoryEstimate:
        """Return the memory of a step with that of the rollouts before it."""
        free = memory.compiled - memory.state
        return replace(
            memory,
            reference=state.trained if self.reference else 0,
            rollout=max(0, self.on_device(plan, state) - free),
        )
