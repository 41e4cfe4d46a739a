"""The memory of scheduled kernels: which arrays exist at the same time, and where they fit."""

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from meshwright.planner.workload.array_operations import Array
from meshwright.planner.workload.gpu_rules import PACKED_ARRAYS
from meshwright.planner.workload.kernel_schedule import Kernel
from meshwright.planner.workload.sizes import USES, DeviceSizes, SizeTable, Use


@dataclass(frozen=True)
class Lifetime:
    """How long an array is in memory: from one moment up to and including another.

    It may be a copy of an input (``copied``); one that ``crosses`` is written in the forward pass
    and read in the backward pass.
    """

    array: Array
    copied: bool
    start: int
    end: int
    crosses: bool


@dataclass(frozen=True)
class Peak:
    """The most bytes at a time, and what they are used for."""

    nbytes: float
    uses: Mapping[Use, float]


class Timeline:
    """Lifetimes as arrays of numbers, so that peaks are found fast."""

    def __init__(self, lifetimes: Sequence[Lifetime]) -> None:
        self.lifetimes = lifetimes
        self.start = np.array([each.start for each in lifetimes])
        self.end = np.array([each.end for each in lifetimes])
        self.sizes = SizeTable([each.array for each in lifetimes], [e.copied for e in lifetimes])


def find_lifetimes(kernels: Sequence[Kernel]) -> list[Lifetime]:
    """Return how long each array of a program is in memory, in moments of the whole program."""
    found: list[Lifetime] = []
    _walk(kernels, 0, found, backward=None)
    # Loops reduce the gradients of each iteration before they add them to the others.
    of_loops = {id(array) for kernel in kernels if kernel.bodies for array in kernel.writes}
    return found + _unreduced([each for each in found if id(each.array) not in of_loops])


def _unreduced(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """Return how long gradients are whole: until the next one is (rule `WHOLE_GRADIENTS`)."""
    made = [each for each in lifetimes if each.array.gradient is not None]
    made.sort(key=attrgetter("start"))
    if not made:  # All of them are of loops, such as those of adapters in blocks.
        return []
    following = [*(each.start for each in made[1:]), max(each.end for each in made)]
    return [
        replace(each, copied=True, end=max(each.start, after))
        for each, after in zip(made, following, strict=True)
    ]


def _walk(
    kernels: Sequence[Kernel], moment: int, found: list[Lifetime], *, backward: bool | None
) -> int:
    """Add the lifetimes of a program that begins at a moment; return the moment after it."""
    started: dict[tuple[int, bool], tuple[Array, int, bool]] = {}

    def end(array: Array, copied: bool, last: int, late: bool) -> None:
        begun = started.pop((id(array), copied), None)
        if begun is not None and last >= begun[1]:
            crosses = late and not begun[2]
            found.append(Lifetime(array, copied, begun[1], last, crosses))

    for kernel in kernels:
        late = kernel.operation.backward if backward is None else backward
        for array in kernel.reused:
            end(array, False, moment - 1, late)
        for array in kernel.writes:
            started[id(array), False] = (array, moment, late)
        for array in kernel.copied:
            started[id(array), True] = (array, moment, late)
        after = moment
        for body in kernel.bodies:
            after = max(after, _walk(body, moment, found, backward=late) - 1)
        for array in kernel.freed:
            end(array, False, after, late)
        for array in kernel.released:
            end(array, True, after, late)
        moment = after + 1
    for key in list(started):
        end(started[key][0], key[1], moment - 1, True)
    return moment


def span_of(kernels: Sequence[Kernel], kernel: Kernel) -> tuple[int, int]:
    """Return the first and the last moment of one kernel of a program."""
    first = sum(map(_moments, kernels[: kernels.index(kernel)]))
    return first, first + _moments(kernel) - 1


def _moments(kernel: Kernel) -> int:
    """Return how many moments a kernel takes: as many as the longest of its bodies."""
    return max([1, *(sum(map(_moments, body)) for body in kernel.bodies)])


def working_in(
    timeline: Timeline, sizes: DeviceSizes, span: tuple[int, int], *, inside: bool
) -> float:
    """Return the most bytes at a time of what only a loop needs, or only what is around it.

    Neither gradients nor gathered weights are counted. ``span`` is the first and the last moment of
    the loop.
    """
    start, end = timeline.start, timeline.end
    within = (start >= span[0]) & (end <= span[1])
    chosen = within if inside else (end < span[0]) | (start > span[1])
    kept = [
        number
        for number in np.flatnonzero(chosen).tolist()
        if _use(timeline.lifetimes[number], sizes) in ("activations", "working")
    ]
    if not kept:
        return 0.0
    return float(_live(timeline.sizes.nbytes(sizes)[kept], start[kept], end[kept]).max())


def peak_of(timeline: Timeline, sizes: DeviceSizes, summed: float = 0.0) -> Peak:
    """Return the peak of a program, its arguments not included.

    ``summed`` are bytes that a loss in parts adds its gradients up in; the parts' own gradients are
    added there as they are computed (rule `SUMMED_IN_PLACE`).
    """
    lifetimes, start, end = timeline.lifetimes, timeline.start, timeline.end
    if not lifetimes:
        return Peak(0.0, dict.fromkeys(USES, 0.0))
    nbytes = timeline.sizes.nbytes(sizes)
    if summed:
        sums = [not each.array.classes & sizes.batch for each in lifetimes]
        nbytes = np.where(np.isclose(nbytes, summed) & sums, 0.0, nbytes)
    live = _live(nbytes, start, end)
    at = int(live.argmax())
    most = float(live[at])
    uses: dict[Use, float] = dict.fromkeys(USES, 0.0)
    for number in np.flatnonzero((start <= at) & (end >= at)).tolist():
        uses[_use(lifetimes[number], sizes)] += float(nbytes[number])
    packed = _packed(nbytes, start, end, most * PACKED_ARRAYS.value)
    uses["working"] += max(0.0, packed - most) + summed
    return Peak(max(most, packed) + summed, uses)


def _live(nbytes: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the bytes in memory at each moment."""
    changes = np.zeros(int(end.max(initial=0)) + 2)
    np.add.at(changes, start, nbytes)
    np.add.at(changes, end + 1, -nbytes)
    return np.cumsum(changes)


def _use(each: Lifetime, sizes: DeviceSizes) -> Use:
    if not each.copied:
        return sizes.use(each.array, crosses=each.crosses)
    return "gathered" if each.array.leaf is not None else "working"


def _packed(nbytes: np.ndarray, start: np.ndarray, end: np.ndarray, least: float) -> float:
    """Return the bytes of a heap in which each array has a fixed place (rule `PACKED_ARRAYS`).

    Arrays of fewer than ``least`` bytes are added as they are.
    """
    large = np.flatnonzero(nbytes >= max(least, 1))
    small = np.flatnonzero(nbytes < max(least, 1))
    by_size = np.argsort(-nbytes[large], kind="stable")
    by_life = np.lexsort((-nbytes[large], start[large] - end[large]))
    top = _top(large[by_size], nbytes, start, end)
    # No order needs less than all that is there at a time.
    if top > float(_live(nbytes[large], start[large], end[large]).max()):
        top = min(top, _top(large[by_life], nbytes, start, end))
    return top + float(_live(nbytes[small], start[small], end[small]).max())


def _top(order: np.ndarray, nbytes: np.ndarray, start: np.ndarray, end: np.ndarray) -> float:
    """Return the end of a heap whose arrays are placed in an order, each in the smallest gap."""
    placed: list[tuple[float, float, int, int]] = []
    top = 0.0
    lists = (each[order].tolist() for each in (nbytes, start, end))
    for size, first, last in zip(*lists, strict=True):
        begin = _smallest_gap(placed, size, first, last)
        insort(placed, (begin, begin + size, first, last))
        top = max(top, begin + size)
    return top


def _smallest_gap(
    placed: Sequence[tuple[float, float, int, int]], size: float, first: int, last: int
) -> float:
    """Return where an array fits best between those placed that live at the same time."""
    best, room, reached = -1.0, math.inf, 0.0
    for begin, end, written, read in placed:
        if written > last or read < first:
            continue
        if size <= begin - reached < room:
            best, room = reached, begin - reached
        if end > reached:
            reached = end
    return best if best >= 0 else reached
