"""What a device holds of the training state on a mesh: exact bytes, leaf by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.mesh.axes import PIPE
from meshwright.planner.workload.sizes import LeafShares
from meshwright.program.trace.layout import Layout, StepLeaf
from meshwright.sharding.placement import Placement
from meshwright.step.optimizer import FlatOptimizer


class WeightKind(NamedTuple):
    """Weights for which devices send the same.

    Attributes:
        nbytes: bytes of one of them, gathered over fsdp.
        reduced: bytes of its gradient where it is computed: in a pipeline, the first and the last
            stage have the whole gradient of what is outside of stages.
        gathered: whether it is divided between updates and gathered for them.
        in_block: whether it belongs to a repeated block, whose weights are gathered in each pass.
        trained: whether it has a gradient.
        scattered: whether the reduced gradient is divided.
    """

    nbytes: float
    reduced: float
    gathered: bool
    in_block: bool
    trained: bool
    scattered: bool


@dataclass(frozen=True)
class PlacedState:
    """The training state on one device.

    Attributes:
        parameters: bytes of parameters and of the model's other state.
        optimizer: bytes of the optimizer's state.
        gradients: bytes of reduced gradients.
        sums: bytes of the sums of gradients over microbatches.
        shares: by number of the step leaf, which part of it the device has.
        weights: how many weights there are of each kind.
        outside: bytes of the parameters outside of pipeline stages, as each stage computes with
            them: divided by the tensor axis alone.
    """

    parameters: int
    optimizer: int
    gradients: int
    sums: int
    shares: Mapping[int, LeafShares]
    weights: Mapping[WeightKind, int]
    outside: float = 0.0


def place_state(
    layout: Layout,
    divided: Sequence[Placement],
    sizes: Mapping[str, int],
    optimizer: FlatOptimizer,
    *,
    zero: int,
    staged: Collection[int] = (),
) -> PlacedState:
    """Return the training state on one device.

    Args:
        layout: the step's leaves.
        divided: the placement of each, divided as far as the mesh does.
        sizes: axis sizes of the mesh.
        optimizer: the optimizer with this layout, on any mesh.
        zero: what the fsdp axis divides: optimizer state, gradients, parameters.
        staged: numbers of the leaves that hold blocks of pipeline stages.
    """
    leaves = layout.step_leaves
    trained = [n for n, step in enumerate(leaves) if step.leaf.role == "param"]
    shares: dict[int, LeafShares] = {}
    parameters = gradients = sums = 0
    outside = 0.0
    reduced: dict[int, float] = {}
    for number, (step, placement) in enumerate(zip(leaves, divided, strict=True)):
        without = _shards(placement, sizes, "fsdp")
        whole = 1 / without
        least = 1 / placement.shards(sizes)
        # Below zero 3, parameters outside of stages are whole on all of them.
        kept = ("fsdp",) if number in staged else ("fsdp", PIPE)
        at_rest = least if zero == 3 else 1 / _shards(placement, sizes, *kept)
        gradient = whole if zero == 1 else least
        shares[number] = LeafShares(whole, at_rest, gradient)
        apart = ("fsdp", PIPE) if staged and number not in staged else ("fsdp",)
        reduced[number] = step.leaf.nbytes / _shards(placement, sizes, *apart)
        parameters += round(step.leaf.nbytes * at_rest)
        if step.leaf.role == "param":
            if staged and number not in staged:
                outside += reduced[number]
            gradients += round(step.leaf.nbytes * gradient)
            sums += round(4 * step.leaf.nbytes / step.leaf.dtype.itemsize * gradient)
    placed = optimizer.placed([divided[n] for n in trained], sizes)
    moments = sum(leaf.nbytes // leaf.placement.shards(sizes) for leaf in placed)
    kinds = _weight_kinds(leaves, shares, reduced)
    return PlacedState(parameters, moments, gradients, sums, shares, kinds, outside)


def _weight_kinds(
    leaves: Sequence[StepLeaf], shares: Mapping[int, LeafShares], reduced: Mapping[int, float]
) -> Counter[WeightKind]:
    return Counter(
        WeightKind(
            nbytes=step.leaf.nbytes * shares[number].whole,
            reduced=reduced[number],
            gathered=shares[number].at_rest < shares[number].whole,
            in_block=_in_block(step),
            trained=step.leaf.role == "param",
            scattered=shares[number].gradient < shares[number].whole,
        )
        for number, step in enumerate(leaves)
        if step.leaf.is_weight
    )


def _in_block(step: StepLeaf) -> bool:
    return step.stacked or any(part.isdigit() for part in step.leaf.path.split("."))


def _shards(placement: Placement, sizes: Mapping[str, int], *without: str) -> int:
    count = 1
    for axis in placement.axes():
        count *= 1 if axis in without else sizes.get(axis, 1)
    return count
