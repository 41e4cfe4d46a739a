"""The search for the fastest plan: every mesh is ranked, or rejected for a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.activity import activity
from meshwright.config.schema import Remat
from meshwright.mesh.axes import shown_sizes
from meshwright.planner.estimate.estimate import Estimate
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
    schedule_choices,
)
from meshwright.planner.search.obstacles import Rejection, check_pins, find_obstacle, no_mesh

TIE = 0.01
"""Estimates that are closer than this are equally good, and the simpler plan is preferred."""
BOUND_SLACK = 0.98
"""How much faster a plan may turn out than the bound of its mesh, which a short search finds."""


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        task: what was planned.
        plans: the best plan of each of the fastest meshes that fit, the recommended one first and
            the others by step time; empty if nothing fits.
        rejected: every other mesh, with the reason.
        num_estimates: how many plans were estimated.
    """

    task: PlanTask
    plans: list[Estimate]
    rejected: list[Rejection]
    num_estimates: int = 0

    @property
    def best(self) -> Estimate:
        """The recommended plan."""
        return self.plans[0]


def search(
    estimator: Estimator,
    task: PlanTask,
    *,
    top: int = 5,
    meshes: Iterable[Sizes] | None = None,
) -> SearchResult:
    """Find the fastest plans.

    Args:
        estimator: estimates plans for the model.
        task: the hardware, the batch and what the user has set.
        top: how many meshes to rank; the others are rejected as slower.
        meshes: the meshes to look at; all by default.
    """
    check_pins(task)
    with activity("comparing plans", afterwards=False) as tell:
        return _Search(estimator, task, top, tell).run(meshes)


@dataclass
class _Search:
    estimator: Estimator
    task: PlanTask
    top: int
    tell: Callable[[str], None]
    known: dict[tuple[tuple[int, ...], Variant, int], Estimate] = field(
        default_factory=dict[tuple[tuple[int, ...], Variant, int], Estimate]
    )

    def run(self, meshes: Iterable[Sizes] | None) -> SearchResult:
        task, rejected = self.task, list[Rejection]()
        usable = list[Sizes]()
        for sizes in meshes or all_sizes(task.hardware.count, task.pins.mesh):
            obstacle = find_obstacle(self.estimator, task, sizes)
            if obstacle is None:
                usable.append(sizes)
            else:
                rejected.append(obstacle)
        if not usable:
            raise no_mesh(task, rejected)
        bounds = [(self._bound(sizes), sizes) for sizes in usable]
        fitting = [
            (bound, sizes)
            for bound, sizes in bounds
            if self._fits(bound) or not self._reject_large(sizes, rejected)
        ]
        plans, slower = self._ranked(fitting)
        rejected += [_slower(each, task, plans[0], at_least=bound) for each, bound in slower]
        return SearchResult(task, self._unrolled(plans), rejected, len(self.known))

    def _reject_large(self, sizes: Sizes, rejected: list[Rejection]) -> bool:
        """Reject a mesh that does not fit even with the settings that need least memory."""
        leanest = first_variants(self.task, sizes, self.estimator.num_blocks)[-1]
        micro = micro_batch_sizes(self.task, sizes, leanest)[0]
        smallest = self._estimate(sizes, leanest, micro)
        if self._fits(smallest):
            return False
        reason = too_large(smallest, self.task.memory_share)
        rejected.append(Rejection(shown_sizes(sizes), "memory", reason, smallest))
        return True

    def _unrolled(self, plans: list[Estimate]) -> list[Estimate]:
        """Return the plans; the first runs its blocks one by one if that fits and is as fast."""
        pinned = self.task.pins.blocks is not None
        if not plans or pinned or not 0 < self.estimator.num_blocks <= MOST_UNROLLED:
            return plans
        first, *others = plans
        sharding = first.plan.sharding.model_copy(update={"blocks": "unroll"})
        plan = first.plan.model_copy(update={"sharding": sharding})
        own = self.estimator.estimate(plan, self.task.hardware)
        better = self._fits(own) and own.time.step <= first.time.step
        return [own, *others] if better else plans

    def _ranked(
        self, bounds: list[tuple[Estimate, Sizes]]
    ) -> tuple[list[Estimate], list[tuple[Estimate, bool]]]:
        """Return the best plans, and the estimates of slower ones: exact, or a bound of the mesh.

        Meshes are searched in the order of a lower bound of their time, until no other mesh can be
        among the best.
        """
        bounds.sort(key=lambda item: item[0].time.step)
        found, slower = list[Estimate](), list[tuple[Estimate, bool]]()
        for bound, sizes in bounds:
            times = sorted(each.time.step for each in found)
            # A simpler mesh that ties with the best is looked for beyond the number to rank.
            full = len(found) >= self.top
            limit = max(times[self.top - 1], times[0] * (1 + TIE)) if full else math.inf
            self.tell(f"{len(self.known):,} estimated")
            hopeful = bound.time.step * BOUND_SLACK <= limit
            best = self._best(sizes, bound, limit) if hopeful else None
            if best is None:
                slower.append((bound, True))
            else:
                found.append(best)
        ordered = rank(found)
        return ordered[: self.top], [*((each, False) for each in ordered[self.top :]), *slower]

    def _bound(self, sizes: Sizes) -> Estimate:
        """Return the fastest plan of a mesh on devices with any amount of memory.

        Computing again only adds work, so only the first choice of remat is considered.
        """
        first = first_variants(self.task, sizes, self.estimator.num_blocks)[0]
        start = self._with_few_reductions(first)
        best = self._fastest(sizes, start, micro_batch_sizes(self.task, sizes, start))
        micro = best.plan.batch.micro_batch_size
        estimates = [
            self._estimate(sizes, variant, micro)
            for variant in self._other_schedules(sizes, start)
            if micro in micro_batch_sizes(self.task, sizes, variant)
        ]
        return min([best, *estimates], key=lambda estimate: estimate.time.step)

    def _best(self, sizes: Sizes, bound: Estimate, limit: float) -> Estimate | None:
        """Return the fastest plan of a mesh that fits; None if all take longer than the limit.

        Settings are tried in the order of their time on devices with any amount of memory, until no
        other can be faster; what the backward pass computes again, from nothing to everything.
        """
        micro = bound.plan.batch.micro_batch_size
        best: Estimate | None = None
        for first in first_variants(self.task, sizes, self.estimator.num_blocks):
            hopes = list[tuple[float, Variant, list[int]]]()
            for variant in self._variants(sizes, first.remat):
                if choices := micro_batch_sizes(self.task, sizes, variant):
                    near = micro if micro in choices else choices[-1]
                    hopes.append((self._estimate(sizes, variant, near).time.step, variant, choices))
            for hope, variant, choices in sorted(hopes, key=lambda item: item[0]):
                if hope * BOUND_SLACK > limit:
                    break
                possible = self._fitting(sizes, variant, choices)
                own = self._fastest(sizes, variant, possible) if possible else None
                if own is not None and own.time.step <= limit:
                    best, limit = own, own.time.step * (1 - 1e-9)
            # Computing again is of use only where memory limits the microbatch.
            if best is not None and best.time.step <= bound.time.step / BOUND_SLACK:
                break
        return best

    def _variants(self, sizes: Sizes, remat: Remat) -> list[Variant]:
        """Return every choice of settings with this remat."""
        variants = first_variants(self.task, sizes, self.estimator.num_blocks)
        own = [variant for variant in variants if variant.remat == remat]
        scheduled = [v for each in own for v in (each, *self._other_schedules(sizes, each))]
        return list(dict.fromkeys([*scheduled, *map(self._with_few_reductions, scheduled)]))

    def _with_few_reductions(self, variant: Variant) -> Variant:
        fixed = self.task.pins.sync_gradients_every is not None
        return variant if fixed else replace(variant, sync_once=True)

    def _other_schedules(self, sizes: Sizes, variant: Variant) -> list[Variant]:
        choices = schedule_choices(self.task, sizes, self.estimator.num_blocks)
        return [
            replace(variant, schedule=name, num_chunks=chunks)
            for name, chunks in choices
            if name != variant.schedule
        ]

    def _fitting(self, sizes: Sizes, variant: Variant, choices: Sequence[int]) -> Sequence[int]:
        """Return the microbatch sizes that fit: more samples need more memory."""
        low, high = 0, len(choices)
        # Often all fit or none.
        if choices and self._fits(self._estimate(sizes, variant, choices[-1])):
            return choices
        while low < high:
            middle = (low + high) // 2
            if self._fits(self._estimate(sizes, variant, choices[middle])):
                low = middle + 1
            else:
                high = middle
        return choices[:low]

    def _fastest(self, sizes: Sizes, variant: Variant, choices: Sequence[int]) -> Estimate:
        """Return the fastest microbatch size, of which the time has one minimum."""
        low, high = 0, len(choices) - 1
        while low < high:
            middle = (low + high + 1) // 2
            smaller = self._estimate(sizes, variant, choices[middle - 1])
            larger = self._estimate(sizes, variant, choices[middle])
            if larger.time.step <= smaller.time.step:
                low = middle
            else:
                high = middle - 1
        return self._estimate(sizes, variant, choices[low])

    def _estimate(self, sizes: Sizes, variant: Variant, micro: int) -> Estimate:
        if self.task.replicas_batch(sizes) == micro:
            # With one microbatch there is one reduction.
            variant = replace(variant, sync_once=False)
        key = (tuple(sizes.values()), variant, micro)
        if key not in self.known:
            plan = make_candidate(self.task, sizes, variant, micro)
            self.known[key] = self.estimator.estimate(plan, self.task.hardware)
        return self.known[key]

    def _fits(self, estimate: Estimate) -> bool:
        return estimate.fits(self.task.memory_share)


def rank(found: Sequence[Estimate]) -> list[Estimate]:
    """Order plans by step time; first comes the simplest of those that tie with the fastest."""
    ordered = sorted(found, key=lambda estimate: estimate.time.step)
    if not ordered:
        return []
    limit = ordered[0].time.step * (1 + TIE)
    tied = [estimate for estimate in ordered if estimate.time.step <= limit]
    first = min(tied, key=lambda estimate: (complexity(estimate), estimate.time.step))
    return [first, *(estimate for estimate in ordered if estimate is not first)]


def complexity(estimate: Estimate) -> tuple[int, ...]:
    """Return what makes a plan less simple, the most important first."""
    plan = estimate.plan
    return (
        plan.size("pipe"),
        plan.size("tensor"),
        plan.size("fsdp"),
        plan.sharding.remat != "none",
        plan.batch.gradient_accumulation_steps,
    )


def _slower(estimate: Estimate, task: PlanTask, best: Estimate, *, at_least: bool) -> Rejection:
    if at_least and not estimate.fits(task.memory_share):
        reason = slower_by_memory(estimate, best, task.memory_share)
    else:
        reason = slower_because(estimate, best, at_least=at_least)
    return Rejection(dict(estimate.plan.mesh), "slower", reason, estimate)
