"""The facts known about a run before its first update: the content of run.json."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from meshwright.mesh.svg_drawing import mesh_svg
from meshwright.pipeline.schedule.timeline_drawing import timeline_svg
from meshwright.planner.fit.fit_check import bytes_on_device
from meshwright.processes import process_count
from meshwright.program.flops import count_flops, peak_flops
from meshwright.runtime.versions import package_versions
from meshwright.sharding.explain import explain
from meshwright.step.assemble import Assembled
from meshwright.text.masking import mask_words
from meshwright.trainer.compiled_step import CompiledStep
from meshwright.trainer.meter import Work
from meshwright.trees import tokens_per_sample

FORMAT = 1


def describe_run(
    assembled: Assembled,
    compiled: CompiledStep,
    work: Work,
    *,
    project: str,
    name: str | None,
    seed: int,
    dataset: Mapping[str, Any],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Return the content of run.json."""
    plan, mesh = assembled.plan, assembled.mesh
    reports = explain(assembled.traced.layout, assembled.decision, plan.mesh)
    return {
        "format": FORMAT,
        "project": project,
        "name": name,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "command": mask_words(sys.argv),
        "devices": describe_devices(mesh.devices),
        "mesh": dict(plan.mesh),
        "mesh_svg": mesh_svg(mesh),
        "plan": plan.describe(),
        "pipeline": describe_pipeline(assembled),
        "parameters": {
            "count": sum(int(np.prod(r.shape)) for r in reports),
            "bytes": sum(r.bytes for r in reports),
        },
        "memory_per_device": memory_per_device(assembled, compiled),
        "sharding": [
            {
                "path": r.path,
                "shape": list(r.shape),
                "dtype": r.dtype,
                "spec": list(r.spec),
                "bytes_per_device": r.bytes_per_device,
                "reason": r.reason,
            }
            for r in reports
        ],
        "flops_per_update": work.flops,
        "peak_flops": work.peak_flops,
        "dataset": dict(dataset),
        "seed": seed,
        "global_batch_size": plan.batch.global_batch_size,
        "tokens_per_sample": None if work.tokens is None else work.tokens // work.samples,
        "compile_seconds": round(compiled.seconds, 2),
        "remarks": list(warnings),
    }


def describe_pipeline(assembled: Assembled) -> dict[str, Any] | None:
    """Return the pipeline stages and a drawing of their schedule; None without stages."""
    report, pipeline = assembled.pipeline_report, assembled.step.pipeline
    if report is None or pipeline is None:
        return None
    table = pipeline.schedule.table(pipeline.num_microbatches, pipeline.num_stages)
    return {
        "schedule": report.schedule,
        "waiting": report.waiting(),
        "stages": [asdict(stage) for stage in report.stages],
        "timeline_svg": timeline_svg(table.timeline()),
    }


def describe_devices(devices: Any) -> dict[str, Any]:
    """Return the number and the kind of devices."""
    first = devices.flat[0]
    return {
        "count": int(devices.size),
        "kind": first.device_kind,
        "platform": first.platform,
        "processes": process_count(),
    }


def memory_per_device(assembled: Assembled, compiled: CompiledStep) -> dict[str, int | None]:
    """Return the bytes of one device by purpose."""
    state = assembled.step.abstract_state()
    batch = 0
    if compiled.memory is not None:
        batch = compiled.memory.argument - bytes_on_device(state)
    temporary = None if compiled.memory is None else compiled.memory.temp
    return {
        "parameters": bytes_on_device(state.params),
        "optimizer": bytes_on_device(state.optimizer),
        "state": bytes_on_device([state.model_state, state.step, state.loss_scale]),
        "batch": max(batch, 0),
        "temporary": temporary,
        "total": bytes_on_device(state) + max(batch, 0) + (temporary or 0),
    }


def work_per_update(assembled: Assembled, batch: Any) -> Work:
    """Return the work of one update on batches like this one."""
    plan, tokens = assembled.plan, tokens_per_sample(batch)
    samples = plan.batch.global_batch_size
    return Work(
        samples=samples,
        tokens=None if tokens is None else tokens * samples,
        flops=count_flops(assembled.traced) * plan.batch.gradient_accumulation_steps,
        peak_flops=peak_flops(list(assembled.mesh.devices.flat), plan.precision),
    )
