"""The error for a model that fits with no plan."""

from __future__ import annotations

import math
from typing import Any

from meshwright.config.microbatches import multiples_around
from meshwright.errors import ExitCode, Setting, UserError
from meshwright.hardware import LOCAL, Hardware
from meshwright.planner.devices.local_hardware import SHARED
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.planner.search.search import SearchResult
from meshwright.planner.search.what_if import smallest_cluster
from meshwright.text.units import counted, human_bytes


class NothingFits(UserError):
    """No plan fits the devices; ``report`` has every mesh with its reason, as plain values."""

    exit_code = ExitCode.NOTHING_FITS

    def __init__(self, what: str, *, why: str, fix: str, report: dict[str, Any]) -> None:
        self.report = report
        super().__init__(what, why=why, fix=fix)


def nothing_fits(estimator: Estimator, result: SearchResult) -> NothingFits:
    """Return the error for a model that fits with no plan, and what would hold it."""
    task = result.task
    large = [each for each in result.rejected if each.kind == "memory"]
    nearest = min(large, key=lambda each: each.distance)
    found = smallest_cluster(estimator, task)
    fits_here = found is not None and found.task.hardware.count <= task.hardware.count
    if not fits_here and _shares_memory(task.hardware):
        found = None
    report = {
        "hardware": str(task.hardware),
        "plans": [],
        "rejected": [each.to_json() for each in result.rejected],
        "smallest_hardware": found and str(found.task.hardware),
        "smallest_mesh": found and found.best.plan.mesh,
        "smallest_global_batch_size": found and found.task.global_batch_size,
    }
    return NothingFits(
        f"no plan fits on {task.hardware}{_divided_batch(task) if fits_here else ''}",
        why=f"the nearest is {nearest}",
        fix=_what_holds_it(task, found),
        report=report,
    )


def _divided_batch(task: PlanTask) -> str:
    """Say that the batch does not divide, which leaves out meshes that fit; empty if it does."""
    count, batch = task.hardware.count, task.global_batch_size
    most = math.gcd(count, batch)
    if most == min(count, batch):
        return ""
    return f": {batch:,} samples per step can only be divided over {most} of {count} devices"


def _what_holds_it(task: PlanTask, found: SearchResult | None) -> str:
    """Return what to use for a model that does not fit; a found cluster holds it."""
    chip = task.hardware.chip.name
    if found is None and _shares_memory(task.hardware):
        local = Setting("hardware", LOCAL)
        this = "" if task.hardware.chip.measured else f" ({local} plans with that of this machine)"
        return (
            f"{SHARED}; use a host with more memory{this}, or name other hardware, such as "
            f"{Setting('hardware', '8xH100')}"
        )
    if found is None:
        return f"no cluster of {chip} holds it; choose a chip with more memory"
    enough, plan = found.task.hardware, found.best.plan.describe()
    if enough.count > task.hardware.count:
        memory = human_bytes(found.best.memory.total)
        return (
            f"the smallest cluster of {chip} that holds it is {enough}: {plan}, {memory} per "
            f"device, {_batch_assumed(found, task)}"
        )
    changes = (
        ["leave the settings of mesh and microbatches out"] if task.fixed != FixedSettings() else []
    )
    if task.global_batch_size % task.hardware.count:
        near = multiples_around(task.global_batch_size, task.hardware.count)
        changes = [f"write {Setting('training.global_batch_size', *near)}", *changes]
    return f"{' and '.join([*changes, f'{enough} holds it'])}: {plan}"


def _shares_memory(hardware: Hardware) -> bool:
    """Whether all devices are those of one host, and use its memory."""
    return hardware.chip.topology == "shared_memory" and hardware.nodes == 1


def _batch_assumed(found: SearchResult, asked: PlanTask) -> str:
    """Say which batch the smallest cluster is for: one that can be divided over its devices."""
    batch = found.task.global_batch_size
    if batch == asked.global_batch_size:
        return f"for the same global batch of {counted(batch, 'sample')}"
    return (
        f"for a global batch of {batch} samples instead of {asked.global_batch_size}, which can be "
        f"divided over {found.task.hardware.count} devices"
    )
