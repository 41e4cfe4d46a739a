"""`meshwright inspect`: the mesh, the plan, what each device holds, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.errors import ExitCode, UserError
from meshwright.mesh.build import build_mesh
from meshwright.mesh.draw import render_mesh
from meshwright.mesh.svg import mesh_svg
from meshwright.pipeline.draw import render_timeline
from meshwright.pipeline.report import pipeline_report
from meshwright.recipe import make_recipe
from meshwright.sharding.explain import LeafReport, explain
from meshwright.step.assemble import Assembled
from meshwright.units import human_bytes


def run(request: Request) -> int:
    """Show the mesh, the plan and every parameter."""
    plan = request.plan()
    mesh = build_mesh(plan.mesh)
    if request.arguments.has("--svg"):
        _write(Path(request.arguments.flags["--svg"]), mesh_svg(mesh))
    assembled = _assemble(request)
    leaves = explain(assembled.traced.layout, assembled.decision, plan.mesh)
    report: dict[str, Any] = {
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "plan": plan.model_dump(mode="json"),
        "parameters": [asdict(leaf) for leaf in leaves],
        "totals": _totals(assembled, leaves),
        "remarks": list(assembled.remarks),
    }
    if assembled.step.pipeline is not None:
        report["pipeline"] = asdict(pipeline_report(assembled.step.pipeline))
    request.output.result(report, _picture(assembled, leaves, report))
    return ExitCode.DONE


def _assemble(request: Request) -> Assembled:
    plan, config = request.plan(), request.config
    recipe = make_recipe(config, plan.batch.global_batch_size)
    batch = recipe.data.batch(0, plan.batch.global_batch_size)
    return recipe.assemble(plan, batch)


def _totals(assembled: Assembled, leaves: list[LeafReport]) -> dict[str, int]:
    sizes = assembled.plan.mesh
    optimizer = sum(
        leaf.nbytes // leaf.placement.shards(sizes) for leaf in assembled.step.optimizer.leaves
    )
    return {
        "parameters": sum(_elements(leaf) for leaf in leaves),
        "bytes": sum(leaf.bytes for leaf in leaves),
        "bytes_per_device": sum(leaf.bytes_per_device for leaf in leaves),
        "optimizer_bytes_per_device": optimizer,
        "bytes_whole": sum(leaf.bytes for leaf in leaves if leaf.whole_over),
    }


def _elements(leaf: LeafReport) -> int:
    count = 1
    for size in leaf.shape:
        count *= size
    return count


def _picture(
    assembled: Assembled, leaves: list[LeafReport], report: dict[str, Any]
) -> RenderableType:
    totals = report["totals"]
    summary = (
        f"{totals['parameters']:,} parameters, {human_bytes(totals['bytes'])}; on each device "
        f"{human_bytes(totals['bytes_per_device'])} of parameters and "
        f"{human_bytes(totals['optimizer_bytes_per_device'])} of optimizer state"
    )
    parts: list[RenderableType] = [
        render_mesh(assembled.mesh),
        Text(),
        Text(assembled.plan.describe()),
        Text(summary),
        *(Text(f"remark: {remark}") for remark in assembled.remarks),
        Text(),
        *_pipeline(assembled, report),
        *_rows(leaves),
    ]
    return Group(*parts)


def _pipeline(assembled: Assembled, report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield what the stages have and when they work."""
    pipeline = assembled.step.pipeline
    if pipeline is None:
        return
    found = report["pipeline"]
    for number, stage in enumerate(found["stages"]):
        blocks = ", ".join(map(str, stage["blocks"]))
        also = " + ".join(["", *stage["also"]])
        yield Text(
            f"stage {number}: blocks {blocks}{also}, {stage['parameters']:,} parameters, "
            f"{stage['flops']:,} FLOPs a microbatch, keeps {stage['microbatches_kept']}"
        )
    table = pipeline.schedule.table(pipeline.num_microbatches, pipeline.num_stages)
    yield render_timeline(table.timeline())
    yield Text()


def _rows(leaves: list[LeafReport]) -> Iterator[Text]:
    """Yield two lines per parameter, what and why; repeated blocks that are alike share theirs."""
    groups = [list(alike) for _, alike in groupby(sorted(leaves, key=_pattern), key=_pattern)]
    width = max(len(_pattern(group[0])[0]) for group in groups)
    for group in groups:
        first = group[0]
        path = _pattern(first)[0] if len(group) > 1 else first.path
        times = f" × {len(group)}" if len(group) > 1 else ""
        shape = "×".join(map(str, first.shape)) or "scalar"
        spec = "[" + ", ".join(axes or "·" for axes in first.spec) + "]"
        size = human_bytes(first.bytes_per_device)
        yield Text.assemble((f"{path:<{width}}", "bold"), f"  {shape + times:<12}  {spec}  {size}")
        yield Text(f"    {first.reason}", style="dim")


def _pattern(leaf: LeafReport) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    parts = ("*" if part.isdecimal() else part for part in leaf.path.split("."))
    return ".".join(parts), leaf.shape, leaf.spec


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}", why=str(error)) from error
