"""`meshwright verify`: the certificate that a mesh trains exactly like one device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.output import write_file
from meshwright.cli.request import Request
from meshwright.errors import ExitCode
from meshwright.mesh.axes import describe_sizes
from meshwright.proof import Certificate, Comparison, verify
from meshwright.recipe import make_recipe
from meshwright.units import counted


def run(request: Request) -> int:
    """Compare the mesh with one device, print and save the certificate."""
    plan, config = request.plan(), request.config
    request.report_unused_settings(plan)
    recipe = make_recipe(config, plan.batch.global_batch_size)
    certificate = verify(
        recipe.model,
        recipe.loss,
        plan,
        lambda step: recipe.data.batch(step, plan.batch.global_batch_size),
        optimizer=recipe.optimizer,
        steps=request.arguments.number("--steps", 5),
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        say=lambda text: request.output.say(Text(text + " …", style="dim")),
    )
    report = certificate.model_dump(mode="json")
    path = Path(request.arguments.flags.get("--out", "certificate.json"))
    write_file(path, json.dumps(report, indent=2) + "\n")
    request.output.result(report, _picture(certificate, path))
    return ExitCode.DONE if certificate.equal else ExitCode.CHECK_FAILED


def _picture(certificate: Certificate, path: Path) -> RenderableType:
    good = certificate.equal
    head = "equal to one device" if good else "NOT equal to one device"
    style = "bold green" if good else "bold red"
    return Group(
        Text.assemble(
            (describe_sizes(certificate.mesh), "bold"),
            schedule_of(certificate.plan),
            ": ",
            (head, style),
        ),
        *_section(
            f"float64, {certificate.steps} updates of {certificate.parameters:,} parameters",
            certificate.float64,
        ),
        *_null_leaves(certificate.null_leaves),
        *_section(f"precision {certificate.plan['precision']}", certificate.own_precision),
        *_section("the loss as written, float32, one device", certificate.as_written),
        Text(f"saved: {path}"),
    )


def schedule_of(plan: Mapping[str, Any]) -> str:
    """Return the pipeline schedule in words; empty without stages."""
    if not plan.get("schedule"):
        return ""
    count = counted(plan["num_microbatches"], "microbatch", "microbatches")
    chunks = plan["num_chunks"]
    pieces = f" and {chunks} chunks a stage" if chunks > 1 else ""
    return f", {plan['schedule']} with {count}{pieces}"


def _section(title: str, comparisons: list[Comparison]) -> list[Text]:
    lines = [Text(f"  {c.sentence()}", style="" if c.equal else "red") for c in comparisons]
    return [Text(title), *lines]


def _null_leaves(names: list[str]) -> list[Text]:
    if not names:
        return []
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    leaves = counted(len(names), "leaf", "leaves")
    text = f"  {leaves} with a true gradient of zero, compared against the global norm: {shown}"
    return [Text(text)]
