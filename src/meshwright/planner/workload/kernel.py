"""One kernel of a program, and what is in memory while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.planner.workload.array_operations import Array, Operation


@dataclass(eq=False)
class Kernel:
    """Something that runs on the device, and what is in memory meanwhile.

    Attributes:
        operation: the operation that ends it.
        reads: what it reads: an array, and the array whose size says how much of it.
        writes: the arrays that it allocates.
        reused: arrays whose memory its results take over.
        freed: arrays that nobody reads afterwards.
        copied: inputs that are copied for it: weights that are gathered, rows of a loop.
        released: copies that nobody reads afterwards.
        rearranged: operands that it copies first, because their dims are in another order.
        bodies: the kernels of a loop's body, or of branches.
        times: how often they run.
    """

    operation: Operation
    reads: list[tuple[Array, Array]]
    writes: list[Array]
    reused: list[Array] = field(default_factory=list[Array])
    freed: list[Array] = field(default_factory=list[Array])
    copied: list[Array] = field(default_factory=list[Array])
    released: list[Array] = field(default_factory=list[Array])
    rearranged: list[Array] = field(default_factory=list[Array])
    bodies: list[list[Kernel]] = field(default_factory=list["list[Kernel]"])
    times: int = 1
