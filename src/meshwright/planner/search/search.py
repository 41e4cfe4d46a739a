"""The search for the fastest plan: every mesh is ranked, or rejected for a reason."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.mesh.axes import MODEL_AXES
from meshwright.planner.estimate.estimate import Estimate, tied_with
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import slower_because, slower_by_memory, too_large
from meshwright.planner.search.candidates import (
    MOST_UNROLLED,
    PlanTask,
    Sizes,
    Variant,
    all_sizes,
    first_variants,
    make_candidate,
    micro_batch_sizes,
    reduces_once,
    schedule_choices,
)
from meshwright.planner.search.obstacles import (
    Kind,
    Rejection,
    check_fixed_mesh,
    find_obstacle,
    no_mesh,
)
from meshwright.runtime.activity import activity

COMPARED = 3
"""How many meshes are compared with blocks that run one by one, at least."""

BOUND_SLACK = 0.98
"""How much faster a plan may turn out than the bound of its mesh, which a short search finds."""

_Key = tuple[tuple[int, ...], Variant, int, bool]
"""The sizes of a mesh, its settings, samples per microbatch, and whether it is a bound."""

_Bounds = list[tuple[Estimate, Sizes]]
"""Meshes, each with a plan that is hardly ever slower than its best one."""


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    ``plans`` are the best of each of the fastest meshes that fit, the recommended one first and the
    others by step time. Why each other mesh is not among them is found only if someone reads
    `rejected`.
    """

    task: PlanTask
    plans: list[Estimate]
    find_rejected: Callable[[], list[Rejection]] = field(repr=False)

    @cached_property
    def rejected(self) -> list[Rejection]:
        """Every other mesh, with the reason."""
        return self.find_rejected()

    @property
    def best(self) -> Estimate:
        """The recommended plan."""
        return self.plans[0]

    def slower(self) -> list[Estimate]:
        """Return the plans that are rejected as slower, the fastest first."""
        return sorted(self._rejected_for("slower"), key=lambda estimate: estimate.time.step)

    def too_large(self) -> list[Estimate]:
        """Return the plans that do not fit, the smallest first."""
        return sorted(self._rejected_for("memory"), key=lambda estimate: estimate.memory.total)

    def _rejected_for(self, kind: Kind) -> list[Estimate]:
        return [e for r in self.rejected if r.kind == kind and (e := r.estimate) is not None]


def search(
    estimator: Estimator, task: PlanTask, *, top: int = 5, meshes: Iterable[Sizes] | None = None
) -> SearchResult:
    """Find the fastest plans: ``top`` of these meshes, or of all; the others are slower."""
    check_fixed_mesh(task)
    with activity("comparing plans", afterwards=False) as show_progress:
        return _Search(estimator, task, top, show_progress).run(meshes)


@dataclass
class _Search:
    estimator: Estimator
    task: PlanTask
    top: int
    show_progress: Callable[[str], None]
    known: dict[_Key, Estimate] = field(default_factory=dict[_Key, Estimate])

    def run(self, meshes: Iterable[Sizes] | None) -> SearchResult:
        task, obstacles, usable = self.task, list[Rejection](), list[Sizes]()
        tokens = self.estimator.tokens_per_sample
        for sizes in meshes or all_sizes(task.hardware.count, task.fixed.mesh, tokens=tokens):
            obstacle = find_obstacle(self.estimator, task, sizes)
            if obstacle is None:
                usable.append(sizes)
            else:
                obstacles.append(obstacle)
        if not usable:
            raise no_mesh(task, obstacles)
        bounds = [(self._bound(sizes), sizes) for sizes in usable]
        found, slower = self._ranked(bounds)
        plans = rank([self._unrolled(each) for each in found])

        def why_rejected() -> list[Rejection]:
            """Return why meshes are not ranked: they cannot be used, do not fit, or are slower."""
            large = {id(bound): self._least(at) for bound, at in bounds if self._large(bound, at)}
            rejected = [*obstacles, *map(self._too_large, large.values())]
            others = [(each, bound) for each, bound in slower if id(each) not in large]
            if not plans:
                return rejected + [self._too_large(each) for each, _ in others]
            alike = [(each, False) for each in plans[self.top :]]
            alike += [(self._as_unrolled(each, found, plans), bound) for each, bound in others]
            return rejected + [_slower(each, task, plans[0], at_least=b) for each, b in alike]

        return SearchResult(task, plans[: self.top], why_rejected)

    def _too_large(self, estimate: Estimate) -> Rejection:
        reason = too_large(estimate, self.task.memory_share)
        return Rejection(dict(estimate.plan.mesh), "memory", reason, estimate)

    def _large(self, bound: Estimate, sizes: Sizes) -> bool:
        """Whether a mesh does not fit, even with the settings that need least memory."""
        return not self._fits(bound) and not self._fits(self._least(sizes))

    def _least(self, sizes: Sizes) -> Estimate:
        """Return the plan of a mesh that needs least memory."""
        leanest = first_variants(self.task, sizes, self.estimator.num_blocks)[-1]
        choices = micro_batch_sizes(self.task, sizes, leanest)
        # One sample at a time, or all at once, which needs no sums of gradients.
        ends = [self._estimate(sizes, leanest, micro) for micro in {choices[0], choices[-1]}]
        return min(ends, key=lambda estimate: estimate.memory.total)

    def _unrolled(self, scanned: Estimate) -> Estimate:
        """Return a plan whose blocks run one by one, if that fits and is as fast."""
        unrolls = 0 < self.estimator.num_blocks <= MOST_UNROLLED
        if self.task.fixed.blocks is not None or not unrolls:
            return scanned
        sharding = scanned.plan.sharding.model_copy(update={"blocks": "unroll"})
        plan = scanned.plan.model_copy(update={"sharding": sharding})
        own = self.estimator.estimate(plan, self.task.hardware)
        better = self._fits(own) and own.time.step <= scanned.time.step
        return own if better else scanned

    def _as_unrolled(
        self, other: Estimate, found: Sequence[Estimate], plans: Sequence[Estimate]
    ) -> Estimate:
        """Return a slower plan as if its blocks ran like those of the best one.

        What that saves is taken from the best plan, so that all times can be compared.
        """
        best = plans[0]
        scanned = next(each for each in found if each.plan.mesh == best.plan.mesh)
        if other.plan.size("pipe") > 1 or other.plan.sharding.blocks == best.plan.sharding.blocks:
            return other
        share = best.time.compute / scanned.time.compute
        return replace(other, time=replace(other.time, compute=share * other.time.compute))

    def _ranked(self, bounds: _Bounds) -> tuple[list[Estimate], list[tuple[Estimate, bool]]]:
        """Return the best plans, and the estimates of slower ones: exact, or a bound of the mesh.

        Meshes are searched in the order of a lower bound of their time, until no other mesh can be
        among the best. Whether the others would fit is not checked.
        """
        found, slower = list[Estimate](), list[tuple[Estimate, bool]]()
        for bound, sizes in sorted(bounds, key=lambda item: item[0].time.step):
            times = sorted(each.time.step for each in found)
            # A simpler mesh that ties with the best is looked for beyond the number to rank.
            full = len(found) >= self.top
            limit = max(times[self.top - 1], tied_with(times[0])) if full else math.inf
            self.show_progress(f"{len(self.known):,} estimated")
            promising = bound.time.step * BOUND_SLACK <= limit
            promising = promising and not self._large(bound, sizes)
            best = self._best(sizes, bound, limit) if promising else None
            if best is None:
                slower.append((bound, True))
            else:
                found.append(best)
        ordered, most = rank(found), max(self.top, COMPARED)
        return ordered[:most], [*((each, False) for each in ordered[most:]), *slower]

    def _bound(self, sizes: Sizes) -> Estimate:
        """Return the fastest plan of a mesh on devices with any amount of memory.

        Recomputing only adds work, so only the first choice of remat is considered.
        """
        first = first_variants(self.task, sizes, self.estimator.num_blocks)[0]
        start = self._with_few_reductions(sizes, first)
        best = self._fastest(sizes, start, micro_batch_sizes(self.task, sizes, start), bound=True)
        micro = best.plan.batch.micro_batch_size
        estimates = [
            self._estimate(sizes, variant, micro, bound=True)
            for variant in self._other_schedules(sizes, start)
            if micro in micro_batch_sizes(self.task, sizes, variant)
        ]
        return min([best, *estimates], key=lambda estimate: estimate.time.step)

    def _best(self, sizes: Sizes, bound: Estimate, limit: float) -> Estimate | None:
        """Return the fastest plan of a mesh that fits; None if all take longer than the limit.

        Settings are tried in the order of their time on devices with any amount of memory, until no
        other can be faster; remat from recomputing nothing to recomputing everything.
        """
        micro = bound.plan.batch.micro_batch_size
        fastest = self.estimator.estimate(bound.plan, self.task.hardware).time.step
        if fastest * BOUND_SLACK > limit:
            return None
        best: Estimate | None = None
        for first in first_variants(self.task, sizes, self.estimator.num_blocks):
            bounds = list[tuple[float, Variant, list[int]]]()
            for variant in self._variants(sizes, first):
                if choices := micro_batch_sizes(self.task, sizes, variant):
                    near = micro if micro in choices else choices[-1]
                    step = self._estimate(sizes, variant, near).time.step
                    bounds.append((step, variant, choices))
            for least, variant, choices in sorted(bounds, key=lambda item: item[0]):
                if least * BOUND_SLACK > limit:
                    break
                possible = self._fitting(sizes, variant, choices)
                own = self._fastest(sizes, variant, possible) if possible else None
                if own is not None and own.time.step <= limit:
                    best, limit = own, own.time.step * (1 - 1e-9)
            # Recomputing helps only where memory limits the microbatch.
            if best is not None and best.time.step <= fastest / BOUND_SLACK:
                break
        return best

    def _variants(self, sizes: Sizes, first: Variant) -> list[Variant]:
        """Return every choice of settings with the remat of the first one."""
        scheduled = [first, *self._other_schedules(sizes, first)]
        seldom = [self._with_few_reductions(sizes, variant) for variant in scheduled]
        return list(dict.fromkeys([*scheduled, *seldom]))

    def _with_few_reductions(self, sizes: Sizes, variant: Variant) -> Variant:
        may = self.task.fixed.sync_gradients_every is None and reduces_once(self.task, sizes)
        # Statistics of a microbatch, and comparisons within it, need the samples of all devices.
        mixes = self.estimator.keeps_statistics or self.estimator.sample_mixing is not None
        return replace(variant, sync_once=True) if may and not mixes else variant

    def _other_schedules(self, sizes: Sizes, variant: Variant) -> list[Variant]:
        return [
            replace(variant, schedule=name, num_chunks=chunks)
            for name, chunks in schedule_choices(self.task, sizes, self.estimator.num_blocks)
            if name != variant.schedule
        ]

    def _fitting(self, sizes: Sizes, variant: Variant, choices: Sequence[int]) -> Sequence[int]:
        """Return the microbatch sizes that fit: more samples need more memory.

        The largest is looked at by itself: if it is the whole batch, gradients are not summed.
        """
        *several, largest = choices

        def too_many(micro: int) -> bool:
            return not self._fits(self._estimate(sizes, variant, micro))

        count = len(several)
        # Often all fit or none.
        if several and too_many(several[-1]):
            count = bisect_left(several, True, key=too_many)
        return [*several[:count], *([] if too_many(largest) else [largest])]

    def _fastest(
        self, sizes: Sizes, variant: Variant, choices: Sequence[int], *, bound: bool = False
    ) -> Estimate:
        """Return the fastest microbatch size, of which the time has one minimum."""
        low, high = 0, len(choices) - 1
        while low < high:
            middle = (low + high + 1) // 2
            smaller = self._estimate(sizes, variant, choices[middle - 1], bound=bound)
            larger = self._estimate(sizes, variant, choices[middle], bound=bound)
            if larger.time.step <= smaller.time.step:
                low = middle
            else:
                high = middle - 1
        return self._estimate(sizes, variant, choices[low], bound=bound)

    def _estimate(
        self, sizes: Sizes, variant: Variant, micro: int, *, bound: bool = False
    ) -> Estimate:
        if self.task.replicas_batch(sizes) == micro:
            # With one microbatch there is one reduction.
            variant = replace(variant, sync_once=False)
        key = (tuple(sizes.values()), variant, micro, bound)
        if key not in self.known:
            plan = make_candidate(self.task, sizes, variant, micro)
            make = self.estimator.bound if bound else self.estimator.estimate
            self.known[key] = make(plan, self.task.hardware)
        return self.known[key]

    def _fits(self, estimate: Estimate) -> bool:
        return estimate.fits(self.task.memory_share)


def rank(found: Sequence[Estimate]) -> list[Estimate]:
    """Order plans by step time; first comes the simplest of those that tie with the fastest."""
    ordered = sorted(found, key=lambda estimate: estimate.time.step)
    if not ordered:
        return []
    limit = tied_with(ordered[0].time.step)
    tied = [estimate for estimate in ordered if estimate.time.step <= limit]
    first = min(tied, key=lambda estimate: (complexity(estimate), estimate.time.step))
    return [first, *(estimate for estimate in ordered if estimate is not first)]


def complexity(estimate: Estimate) -> tuple[int, ...]:
    """Return what makes a plan less simple, the most important first.

    That is what it divides: the blocks, the layers, rows, the training state, or the samples alone.
    Then how many nodes hold a copy of the model: beyond them, copies need only exchange gradients.
    """
    plan = estimate.plan
    shards = math.prod(plan.size(axis) for axis in MODEL_AXES)
    return (
        plan.size("pipe") > 1,
        plan.size("tensor") > 1,
        plan.size("context") > 1,
        plan.size("fsdp") > 1,
        math.ceil(shards / estimate.hardware.devices_per_node),
        len(plan.mesh),
        plan.sharding.remat != "none",
        plan.size("pipe"),
        plan.size("tensor"),
        plan.size("fsdp"),
        plan.batch.gradient_accumulation_steps,
    )


def _slower(estimate: Estimate, task: PlanTask, best: Estimate, *, at_least: bool) -> Rejection:
    if at_least and not estimate.fits(task.memory_share):
        reason = slower_by_memory(estimate, best, task.memory_share)
    else:
        reason = slower_because(estimate, best, at_least=at_least)
    return Rejection(dict(estimate.plan.mesh), "slower", reason, estimate)
