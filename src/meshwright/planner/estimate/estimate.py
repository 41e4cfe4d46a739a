"""What a plan needs on some hardware: memory and time per device, by what they are used for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.hardware import MEMORY_SHARE, Hardware
from meshwright.plan import Plan

CPU_MARGIN = 1.0
"""Memory that plans for CPUs leave for what is not predicted there, such as activations, relative
to state, gradients and batch."""
MARGIN_WORDS = (
    "on CPUs only state, gradients and batch are predicted; as much again is left for everything "
    "else"
)

TIE = 0.04
"""Times of two plans that differ by less are equally good: about the error of estimates."""
UNSEEN_SECONDS = 1e-3
"""So are steps that differ by less: the host takes as long for each, which is not estimated."""


def tied_with(seconds: float) -> float:
    """Return the longest step that is as good as one of these seconds."""
    return max(seconds * (1 + TIE), seconds + UNSEEN_SECONDS)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device while a step runs.

    Parameters (with other state of the model), optimizer and batch are exact, and so are
    ``all_gradients``, which exist together before the optimizer runs. Gradients, gathered or cast
    weights, activations for the backward pass and what else is ``working`` are those at the moment
    of the peak. The margin ``reserved`` is not in `compiled`, and neither are the ``reference`` of
    learning from rewards, and what a ``rollout`` needs beyond what a step has besides its state.
    """

    parameters: int
    optimizer: int
    gradients: int
    batch: int
    gathered: int = 0
    activations: int = 0
    working: int = 0
    reserved: int = 0
    reference: int = 0
    rollout: int = 0
    all_gradients: int = 0

    @property
    def state(self) -> int:
        """Bytes of the training state: parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def least(self) -> int:
        """Bytes without which no step is possible: state, gradients, batch."""
        return self.state + self.batch + self.all_gradients + self.reference

    @property
    def compiled(self) -> int:
        """Bytes that the compiled program needs."""
        computed = self.gathered + self.activations + self.working
        return self.state + self.gradients + self.batch + computed

    @property
    def total(self) -> int:
        """Bytes in use on the device."""
        return self.compiled + self.reserved + self.reference + self.rollout


@dataclass(frozen=True)
class AxisTraffic:
    """What a mesh axis sends per step; exposed is the time that computing does not hide."""

    sent_bytes: float
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one step: kernels, what stages add to them, traffic, and waiting for other stages.

    FLOPs are those of all devices, without recomputation.
    """

    compute: float
    traffic: Mapping[str, AxisTraffic] = field(default_factory=dict[str, AxisTraffic])
    bubble: float = 0.0
    flops: float = 0.0
    peak_flops: float = 1.0
    staging: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which a device waits for what others send."""
        return sum(axis.exposed_seconds for axis in self.traffic.values())

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.compute + self.staging + self.exposed + self.bubble

    @property
    def mfu(self) -> float:
        """The share of the peak at which the model's operations run."""
        return self.flops / (self.step * self.peak_flops)


@dataclass(frozen=True)
class Estimate:
    """What a plan needs on some hardware; the memory is computed when it is asked for."""

    plan: Plan
    hardware: Hardware
    time: TimeEstimate
    find_memory: Callable[[], MemoryEstimate] = field(repr=False)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Bytes per device."""
        return self.find_memory()

    @property
    def capacity(self) -> int:
        """Bytes of memory of one device."""
        return int(self.hardware.chip.hbm_gb_per_device * 1e9)

    @property
    def share(self) -> float:
        """The share of a device's memory that is in use."""
        return self.memory.total / self.capacity

    def fits(self, share: float = MEMORY_SHARE) -> bool:
        """Whether it fits into this share of a device's memory."""
        return self.memory.total <= share * self.capacity
