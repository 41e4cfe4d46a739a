"""Pipeline schedules: the order in which each stage works on its microbatches."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import ClassVar

from meshwright.config.argument_checks import check_count, check_kind
from meshwright.config.microbatches import multiples_around
from meshwright.errors import Setting, UserError, did_you_mean
from meshwright.pipeline.schedule.operations import Kind, Op, Shape
from meshwright.pipeline.schedule.timeline import TickTable, in_lockstep
from meshwright.text.units import counted


@dataclass(frozen=True)
class Schedule(ABC):
    """The order of the operations of each stage.

    A schedule has two forms. `operations` is the order for stages that run independently and wait
    only for their inputs. `table` is for one program that all stages execute together, tick by
    tick, where every tick lasts as long as its slowest stage.
    """

    name: ClassVar[str] = ""
    """Its name in a config."""
    splits_backward: ClassVar[bool] = False
    """Whether input and weight gradients are operations of their own."""

    num_chunks: int = field(default=1, init=False, repr=False)
    """Pieces of the model on each stage."""

    def shape(self, num_microbatches: int, num_stages: int) -> Shape:
        """Return the pipeline's size, if this schedule can run it."""
        return Shape(num_microbatches, num_stages, self.num_chunks)

    @abstractmethod
    def operations(self, num_microbatches: int, num_stages: int) -> list[list[Op]]:
        """Return the operations of each stage, in order."""

    def table(self, num_microbatches: int, num_stages: int) -> TickTable:
        """Return the operations of all stages, tick by tick: one per stage and tick."""
        shape = self.shape(num_microbatches, num_stages)
        return in_lockstep(self.operations(num_microbatches, num_stages), shape)

    def bubble(self, num_microbatches: int, num_stages: int) -> Fraction:
        """Return the share of time a stage waits if all stages are equally fast.

        A forward pass is assumed to cost as much as each of the two gradients.
        """
        self.shape(num_microbatches, num_stages)
        late = num_stages - 1
        return Fraction(late, self._work_per_microbatch * num_microbatches + late)

    def efficiency(self, num_microbatches: int, num_stages: int) -> Fraction:
        """Return the share of time a stage works: ``1 - bubble``."""
        return 1 - self.bubble(num_microbatches, num_stages)

    def microbatches_for(self, efficiency: Fraction | float, num_stages: int) -> int:
        """Return the fewest microbatches with at least this efficiency."""
        check_count("num_stages", num_stages)
        try:
            goal = Fraction(efficiency).limit_denominator(10**6)
        except (TypeError, ValueError):
            goal = Fraction(0)
        if not 0 < goal < 1:
            raise UserError(f"an efficiency of {efficiency} cannot be reached", fix="write 0.9")
        exact = goal * (num_stages - 1) / ((1 - goal) * self._work_per_microbatch)
        return max(1, -(-exact.numerator // exact.denominator))

    @property
    def _work_per_microbatch(self) -> int:
        """The factor k of the bubble, (S-1) / (k·M + S-1)."""
        return self.num_chunks


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forward passes, then all backward passes; every microbatch stays in memory in between."""

    name: ClassVar[str] = "gpipe"

    def operations(self, num_microbatches: int, num_stages: int) -> list[list[Op]]:
        """Return the operations of each stage, in order."""
        shape = self.shape(num_microbatches, num_stages)
        every = range(shape.num_microbatches)
        ops = [Op(Kind.FORWARD, m) for m in every] + [Op(Kind.BACKWARD, m) for m in every]
        return [list(ops) for _ in range(shape.num_stages)]


@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """After a warm-up, each stage runs one backward for each forward.

    A stage holds the activations of at most as many microbatches as there are stages, or twice as
    many in lockstep.
    """

    name: ClassVar[str] = "1f1b"

    def operations(self, num_microbatches: int, num_stages: int) -> list[list[Op]]:
        """Return the operations of each stage, in order."""
        shape = self.shape(num_microbatches, num_stages)
        lists: list[list[Op]] = []
        for stage in range(shape.num_stages):
            behind = shape.num_stages - 1 - stage
            # With chunks, a second pass over the later stages keeps them busy meanwhile.
            trips = 2 if self.num_chunks > 1 else 1
            ahead = trips * behind + (self.num_chunks - 1) * shape.num_stages
            lists.append(self._alternating(shape, ahead))
        return lists

    def table(self, num_microbatches: int, num_stages: int) -> TickTable:
        """Return the operations tick by tick: up to one forward and one backward per tick.

        The gradient of the first microbatch returns after two passes over the stages, so each stage
        runs twice as many microbatches ahead as in `operations`.
        """
        shape = self.shape(num_microbatches, num_stages)
        total = shape.num_microbatches * shape.num_chunks
        first_backward = shape.num_virtual - 1
        last = shape.num_stages - 1

        def ops(tick: int, stage: int) -> tuple[Op, ...]:
            backward = tick - first_backward - (last - stage)
            pairs = ((Kind.FORWARD, tick - stage), (Kind.BACKWARD, backward))
            return tuple(self._nth(kind, n, shape) for kind, n in pairs if 0 <= n < total)

        stages, ticks = range(shape.num_stages), range(total + first_backward + last)
        return TickTable(shape, tuple(tuple(ops(tick, s) for s in stages) for tick in ticks))

    def _alternating(self, shape: Shape, ahead: int) -> list[Op]:
        total = shape.num_microbatches * shape.num_chunks
        forward, backward = (
            [self._nth(kind, n, shape) for n in range(total)]
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        alternating = chain(*zip(forward[ahead:], backward, strict=False))
        return [*forward[:ahead], *alternating, *backward[max(0, total - ahead) :]]

    def _nth(self, kind: Kind, number: int, shape: Shape) -> Op:
        """Return a stage's n-th forward or backward; backwards visit the chunks in reverse."""
        microbatch, chunk = shape.nth_pass(number)
        return Op(
            kind, microbatch, shape.num_chunks - 1 - chunk if kind is Kind.BACKWARD else chunk
        )


@dataclass(frozen=True)
class Interleaved(OneForwardOneBackward):
    """One forward, one backward, several chunks per stage, so that the pipeline fills faster."""

    name: ClassVar[str] = "interleaved"
    num_chunks: int = 2

    def shape(self, num_microbatches: int, num_stages: int) -> Shape:
        """Return the pipeline's size; microbatches run in groups of one per stage."""
        if self.num_chunks > 1 and num_microbatches % num_stages:
            nearest = multiples_around(num_microbatches, num_stages)
            raise UserError(
                f"{counted(num_microbatches, 'microbatch')} cannot be divided into groups of "
                f"{num_stages}, one per stage",
                why=f"{num_microbatches} is not a multiple of {num_stages}",
                fix=f"write {Setting('pipeline.num_microbatches', *nearest)}, or "
                f"{Setting('pipeline.schedule', '1f1b')}",
            )
        return super().shape(num_microbatches, num_stages)


@dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
    """One forward, one backward, with weight gradients delayed until a stage would be idle.

    Other stages wait for the gradient with respect to the input only. As many microbatches are in
    memory as with 1F1B.
    """

    name: ClassVar[str] = "zb_h1"
    splits_backward: ClassVar[bool] = True

    def operations(self, num_microbatches: int, num_stages: int) -> list[list[Op]]:
        """Return the operations of each stage, in order."""
        shape = self.shape(num_microbatches, num_stages)
        return [_delayed(shape, stage) for stage in range(shape.num_stages)]

    def bubble(self, num_microbatches: int, num_stages: int) -> Fraction:
        """Return (S-1) / (3M+S-1); more with fewer microbatches than stages."""
        self.shape(num_microbatches, num_stages)
        work = 3 * num_microbatches
        makespan = max(work + num_stages - 1, 2 * (num_microbatches + num_stages) - 1)
        return 1 - Fraction(work, makespan)

    @property
    def _work_per_microbatch(self) -> int:
        return 3


def _delayed(shape: Shape, stage: int) -> list[Op]:
    total = shape.num_microbatches
    ahead = min(shape.num_stages - 1 - stage, total)
    ops = [Op(Kind.FORWARD, m) for m in range(ahead)]
    waiting: deque[int] = deque()
    for m in range(total):
        if ahead + m < total:
            ops.append(Op(Kind.FORWARD, ahead + m))
        ops.append(Op(Kind.INPUT_GRAD, m))
        waiting.append(m)
        # Gradients reach early stages late; the weight gradients they still have fill the wait
        # at the end.
        if len(waiting) > stage:
            ops.append(Op(Kind.WEIGHT_GRAD, waiting.popleft()))
    return ops + [Op(Kind.WEIGHT_GRAD, m) for m in waiting]


def get_schedule(name: str, num_chunks: int = 2) -> Schedule:
    """Return a schedule by its name in a config: gpipe, 1f1b, interleaved or zb_h1.

    Args:
        name: its name.
        num_chunks: pieces of the model on each stage; only interleaved has several.
    """
    check_count("num_chunks", num_chunks)
    known: dict[str, Schedule] = {
        "gpipe": GPipe(),
        "1f1b": OneForwardOneBackward(),
        "interleaved": Interleaved(num_chunks),
        "zb_h1": ZeroBubbleH1(),
    }
    check_kind("schedule", name, str, f"write one of {', '.join(known)}")
    if name not in known:
        raise UserError(
            f"there is no pipeline schedule `{name}`",
            why=f"there are {', '.join(known)}",
            fix=did_you_mean(str(name).lower(), known) or "write 1f1b, which suits most models",
        )
    return known[name]
