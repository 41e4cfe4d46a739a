"""`meshwright verify`: the certificate that a mesh trains exactly like one device."""

import json
from pathlib import Path

from rich.console import Group
from rich.text import Text

from meshwright.cli.output import write_file
from meshwright.cli.request import Request
from meshwright.errors import ExitCode


def run(request: Request) -> int:
    """Compare the mesh with one device, print and save the certificate."""
    plan, trainer = request.plan(), request.trainer()
    request.report_unused_settings(plan, steps_flag="--steps")
    recipe = trainer.defaults.recipe
    assert recipe is not None
    certificate = trainer.verify(
        lambda step: recipe.data.batch(step, plan.batch.global_batch_size),
        steps=request.arguments.number("--steps", 5),
    )
    report = certificate.model_dump(mode="json")
    path = Path(request.arguments.flags.get("--out", "certificate.json"))
    write_file(path, json.dumps(report, indent=2) + "\n")
    saved = Text(f"saved: {path}", overflow="ignore", no_wrap=True)
    request.output.result(report, Group(certificate.picture(), saved))
    return ExitCode.DONE if certificate.equal else ExitCode.CHECK_FAILED
