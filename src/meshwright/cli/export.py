"""`meshwright export`: the parameters of a checkpoint as a safetensors file."""

from __future__ import annotations

import math

from meshwright.activity import activity
from meshwright.checkpoint import export_safetensors
from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import ExitCode, UserError


def run(arguments: Arguments, output: Output) -> int:
    """Write the file and print a summary."""
    words = arguments.overrides
    if len(words) != 2:
        raise UserError(
            "export takes a run and a file",
            why=f"given: {' '.join(words) or 'nothing'}",
            fix="write meshwright export outputs/<project>/<date>/<time> model.safetensors",
        )
    update = _update(arguments)
    with activity(f"writing {words[1]}"):
        shapes = export_safetensors(*words, update=update)
    count = sum(math.prod(shape) for shape in shapes.values())
    if output.as_json:
        listed = {name: list(shape) for name, shape in shapes.items()}
        output.result({"file": words[1], "parameters": count, "tensors": listed})
    else:
        output.text(f"{words[1]}: {len(shapes)} tensors, {count:,} parameters")
    return ExitCode.DONE


def _update(arguments: Arguments) -> int | None:
    text = arguments.flags.get("--update")
    if text is None:
        return None
    if not text.isdecimal():
        raise UserError(f"--update {text} is not a number", fix="write --update 100")
    return int(text)
