"""Fits the times of kernels to measured steps: `KERNEL_TIMES` in planner/workload/gpu_rules.

Least squares of the relative errors of the points in benchmarks/results/gpu_planner.json that are
marked `fitted`. Records from before 2026-11-18 timed the first second, in which a GPU is faster.
Nothing runs on a GPU. The fit is printed beside the constants of the table, with the errors of
both; the table changes by hand.

The points alone do not determine all constants: a free fit moves `row_sum` to a tenth, and the
other points get worse (median error 6.5% instead of 4.1%). So constants are pulled towards those of
the table, and the shares of attention, which were measured by themselves, stay.

    python benchmarks/fit_gpu_times.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_planner import Point, planned
from record import read_record
from scipy.optimize import least_squares

from meshwright.hardware import Chip, parse_hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.workload.gpu_rules import KERNEL_TIMES, KernelTimes
from meshwright.planner.workload.work_table import Works, seconds_of

HARDWARE = "1xH200"
"""What the record was measured on."""
MEASURED = ("attention", "attention_gradient")
"""Constants that are not fitted."""
PULL = 0.1
"""How much the relative change of a constant counts beside the relative error of a point."""


@dataclass(frozen=True)
class Measured:
    """A point that was measured.

    Attributes:
        point: the point.
        works: the kernels of one microbatch.
        chip: the chip.
        rest: seconds of a step besides those kernels.
        seconds: measured seconds of a step.
    """

    point: Point
    works: Works
    chip: Chip
    rest: float
    seconds: float

    def error(self, times: KernelTimes) -> float:
        """Return how far the predicted time is off, as a share of the measured one."""
        kernels = _kernel_seconds(self.point, self.works, self.chip, times)
        return (kernels + self.rest) / self.seconds - 1


def main() -> None:
    points = read_points()
    fitted = [each for each in points if each.point.fitted]
    table = KERNEL_TIMES.value
    fit = fit_times(fitted, table)
    for name, old, new in zip(KernelTimes._fields, table, fit, strict=True):
        print(f"{name:20} {old:10.4g} in the table, {new:10.4g} fitted")
    fresh = [each for each in points if not each.point.fitted]
    for what, chosen in (("fitted", fitted), ("other", fresh)):
        print(f"{len(chosen)} {what} points: {_errors(chosen, table)} with the table, "
              f"{_errors(chosen, fit)} with the fit")  # fmt: skip


def read_points() -> list[Measured]:
    """Return the points of the record, with what their kernels do."""
    hardware = parse_hardware(HARDWARE)
    found: list[Measured] = []
    estimators: dict[str, Estimator] = {}
    for row in read_record("gpu_planner")["rows"]:
        if "ms" not in row:
            continue
        point = Point(**{name: row[name] for name in Point._fields})
        run = planned(point)
        if point.model not in estimators:
            estimators[point.model] = run.estimator()
        works = estimators[point.model].works(run.plan, hardware)
        step = estimators[point.model].estimate(run.plan, hardware).time.step
        kernels = _kernel_seconds(point, works, hardware.chip, KERNEL_TIMES.value)
        found.append(Measured(point, works, hardware.chip, step - kernels, row["ms"] / 1e3))
    return found


def fit_times(points: Sequence[Measured], start: KernelTimes) -> KernelTimes:
    """Return the constants with the least squares of relative errors."""
    free = [name for name in KernelTimes._fields if name not in MEASURED]

    def changed(factors: Any) -> KernelTimes:
        pairs = zip(free, factors, strict=True)
        return start._replace(**{name: getattr(start, name) * factor for name, factor in pairs})

    def errors(factors: Any) -> list[float]:
        times = changed(factors)
        return [*(point.error(times) for point in points), *(PULL * np.log(factors))]

    return changed(least_squares(errors, np.ones(len(free)), bounds=(0.1, 10)).x.tolist())


def _kernel_seconds(point: Point, works: Works, chip: Chip, times: KernelTimes) -> float:
    """Return the seconds of all kernels of a step's microbatches."""
    rate = chip.tflops_per_device * 1e12 * chip.product_share * chip.bfloat16_share
    return point.microbatches * float((works.times * seconds_of(works, chip, rate, times)).sum())


def _errors(points: Sequence[Measured], times: KernelTimes) -> str:
    errors = [abs(point.error(times)) for point in points]
    return f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}"


if __name__ == "__main__":
    main()
