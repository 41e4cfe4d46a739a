"""`meshwright verify`: the certificate that a mesh trains exactly like one device."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.output import write_file
from meshwright.cli.request import Request
from meshwright.errors import ExitCode
from meshwright.proof import Certificate, Comparison, verify
from meshwright.recipe import make_recipe
from meshwright.text.columns import Indented


def run(request: Request) -> int:
    """Compare the mesh with one device, print and save the certificate."""
    plan, config = request.plan(), request.config
    request.report_unused_settings(plan, updates_flag="--steps")
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
    )
    report = certificate.model_dump(mode="json")
    path = Path(request.arguments.flags.get("--out", "certificate.json"))
    write_file(path, json.dumps(report, indent=2) + "\n")
    request.output.result(report, _picture(certificate, path))
    return ExitCode.DONE if certificate.equal else ExitCode.CHECK_FAILED


def _picture(certificate: Certificate, path: Path) -> RenderableType:
    style = "bold green" if certificate.equal else "bold red"
    notes = [
        certificate.null_leaves_note(),
        *certificate.not_compared_notes(),
        *certificate.kernel_notes(),
    ]
    return Group(
        Text.assemble((certificate.configuration(), "bold"), ": ", (certificate.verdict(), style)),
        *(line for section in certificate.sections() for line in _section(*section)),
        *(Indented(note, 2, first=0) for note in notes if note),
        *(Indented(f"warning: {w}", 2, style="yellow", first=0) for w in certificate.warnings),
        Text(f"saved: {path}", overflow="ignore", no_wrap=True),
    )


def _section(title: str, comparisons: list[Comparison]) -> list[RenderableType]:
    lines = [Indented(c.sentence(), style="" if c.equal else "red", first=2) for c in comparisons]
    return [Text(title), *lines]
