"""`meshwright inspect`: the mesh, the plan, and how and why parameters are sharded."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.output import write_file
from meshwright.cli.request import Request, assemble_first
from meshwright.errors import ExitCode, UserError
from meshwright.generation.model_facts import how_generated
from meshwright.mesh.axes import describe_sizes
from meshwright.mesh.build import build_mesh
from meshwright.mesh.svg_drawing import Rows, mesh_svg
from meshwright.mesh.terminal_drawing import render_mesh
from meshwright.pipeline.pipeline_report import PipelineReport
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.pipeline.schedule.timeline_drawing import Timeline, TimelineDrawing, timeline_svg
from meshwright.plan import Plan, unused_settings
from meshwright.sharding.explain import LeafReport, explain
from meshwright.step.assemble import Assembled
from meshwright.text.columns import Columns, Indented
from meshwright.text.units import counted, human_bytes, numbered
from meshwright.trees import bytes_on_device


def run(request: Request) -> int:
    """Show the mesh, the plan and every parameter."""
    plan = request.plan()
    mesh = build_mesh(plan.mesh)
    flags, drawings = request.arguments.flags, dict[str, str]()
    if request.arguments.has("--timeline"):
        drawings[flags["--timeline"]] = pipeline_svg(plan)
    _, assembled = assemble_first(request.trainer())
    if request.arguments.has("--svg"):
        drawings[flags["--svg"]] = mesh_svg(mesh, _rows_of(assembled))
    # Last, so that a failed command writes no files.
    for file, drawing in drawings.items():
        write_file(Path(file), drawing)
    remarks = [*unused_settings(request.config, plan), *assembled.remarks]
    leaves = explain(assembled.traced.layout, assembled.decision, plan.mesh)
    report: dict[str, Any] = {
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "plan": plan.model_dump(mode="json"),
        "parameters": [asdict(leaf) for leaf in leaves],
        "totals": _totals(assembled, leaves),
        "remarks": remarks,
        "context": assembled.decision.exchanges.describe(),
        "kernels": [asdict(use) for use in assembled.decision.kernels.uses],
    }
    if how := how_generated(assembled.abstract_model()):
        report["generation"] = how
    if assembled.pipeline_report is not None:
        report["pipeline"] = asdict(assembled.pipeline_report)
    request.output.result(report, _picture(assembled, leaves, report))
    return ExitCode.DONE


def pipeline_svg(plan: Plan) -> str:
    """Return a drawing of the pipeline schedule of a plan, with equally fast stages."""
    if plan.size("pipe") == 1:
        raise UserError(
            "--timeline draws pipeline stages, but there are none",
            why=f"the mesh is {describe_sizes(plan.mesh)}",
            fix="write mesh.pipe=…, or --svg FILE for a drawing of the mesh",
        )
    count, chunks = counted(plan.num_microbatches, "microbatch"), plan.num_chunks
    pieces = f", {chunks} chunks" if chunks > 1 else ""
    title = f"{plan.schedule}, {plan.size('pipe')} stages, {count}"
    return timeline_svg(_timeline(plan), title + pieces)


def _totals(assembled: Assembled, leaves: list[LeafReport]) -> dict[str, int]:
    state = assembled.step.abstract_state
    return {
        "parameters": sum(math.prod(leaf.shape) for leaf in leaves),
        "bytes": sum(leaf.bytes for leaf in leaves),
        "bytes_per_device": bytes_on_device(state.params),
        "optimizer_bytes_per_device": bytes_on_device(state.optimizer),
        "bytes_whole": sum(leaf.bytes for leaf in leaves if leaf.whole_over),
    }


def _picture(
    assembled: Assembled, leaves: list[LeafReport], report: dict[str, Any]
) -> RenderableType:
    totals, how = report["totals"], report.get("generation")
    summary = (
        f"{totals['parameters']:,} parameters, {human_bytes(totals['bytes'])}; on each device "
        f"{human_bytes(totals['bytes_per_device'])} of parameters and "
        f"{human_bytes(totals['optimizer_bytes_per_device'])} of optimizer state"
    )
    return Group(
        render_mesh(assembled.mesh),
        Text(),
        Text(assembled.plan.describe()),
        Text(summary),
        *(Indented(f"remark: {remark}", first=0) for remark in report["remarks"]),
        Text(),
        *_pipeline(assembled, assembled.pipeline_report),
        *_listed("context", assembled.decision.exchanges.describe()),
        *(_listed("kernels", assembled.kernels) or (Text(_why_no_kernels(assembled)), Text())),
        *([Indented(f"generation: {how}", first=0), Text()] if how else []),
        _rows(leaves),
    )


def _pipeline(assembled: Assembled, found: PipelineReport | None) -> Iterator[RenderableType]:
    """Yield the contents of the stages, and the schedule; nothing without stages."""
    if found is None:
        return
    for number, stage in enumerate(found.stages):
        blocks = numbered("block", stage.blocks, len(stage.blocks))
        also = " + ".join(["", *stage.also])
        kept = counted(stage.microbatches_kept, "microbatch")
        yield Text(
            f"stage {number}: {blocks}{also}, {stage.parameters:,} parameters, "
            f"{stage.flops:,} FLOPs a microbatch, keeps {kept}"
        )
    yield Text()
    yield TimelineDrawing(_timeline(assembled.plan))
    yield Text(found.waiting())
    yield Text()


def _listed(head: str, lines: Sequence[str]) -> list[RenderableType]:
    """Return lines below a head; nothing without lines."""
    return [Text(head), *(Indented(line, 4, first=2) for line in lines), Text()] if lines else []


def _rows_of(assembled: Assembled) -> Rows | None:
    """Return what a context axis divides; None without one."""
    lengths = [placed.length for placed in assembled.decision.exchanges.attention.values()]
    return (assembled.plan.batch.global_batch_size, max(lengths)) if lengths else None


def _why_no_kernels(assembled: Assembled) -> str:
    """Return why no part of the model is evaluated by a kernel."""
    choice, platform = assembled.plan.kernels, assembled.mesh.devices.flat[0].platform
    if choice == "none":
        return "kernels: off (kernels=none)"
    if choice == "auto" and platform != "gpu":
        return (
            f"kernels: none on {platform.upper()}s (kernels=auto); kernels=xla evaluates the same "
            "parts on any device"
        )
    return f"kernels: no part of the model matches a kernel (kernels={choice})"


def _timeline(plan: Plan) -> Timeline:
    """Return the schedule of a plan as a timeline, with equally fast stages."""
    schedule = get_schedule(plan.schedule or "1f1b", plan.num_chunks)
    return schedule.table(plan.num_microbatches, plan.size("pipe")).timeline()


def _rows(leaves: list[LeafReport]) -> Columns:
    """Return parameters with their reasons; equal parameters of blocks share a row."""
    groups = [list(alike) for _, alike in groupby(sorted(leaves, key=_pattern), key=_pattern)]
    return Columns(
        ("parameter", "shape", "mesh axes by dim", "on a device"),
        [_cells(group) for group in groups],
        notes=[group[0].reason for group in groups],
    )


def _cells(group: list[LeafReport]) -> tuple[Text | str, ...]:
    first, times = group[0], f" × {len(group)}" if len(group) > 1 else ""
    path = _pattern(first)[0] if times else first.path
    shape = "×".join(map(str, first.shape)) or "scalar"
    spec = "[" + ", ".join(axes or "·" for axes in first.spec) + "]"
    each = " each" if times else ""
    return Text(path, "bold"), shape + times, spec, human_bytes(first.bytes_per_device) + each


def _pattern(leaf: LeafReport) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    parts = ("*" if part.isdecimal() else part for part in leaf.path.split("."))
    return ".".join(parts), leaf.shape, leaf.spec
