"""`meshwright export`: the parameters of a run as a safetensors file or a Hugging Face folder."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from meshwright.checkpoint import export_safetensors
from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import ExitCode, UserError
from meshwright.runtime.activity import activity

_RUN = "outputs/<project>/<date>/<time>"


def run(arguments: Arguments, output: Output) -> int:
    """Write the file or the folder, and print a summary."""
    if arguments.has("--to"):
        return _to_hf(arguments, output)
    if arguments.has("--dtype"):
        raise UserError("--dtype is for folders", fix="write --to hf FOLDER too")
    words = arguments.words("a run", "a file", example=f"{_RUN} model.safetensors")
    chosen = _chosen(arguments)
    with activity(f"writing {words[1]}"):
        shapes = export_safetensors(*words, **chosen)
    count = sum(math.prod(shape) for shape in shapes.values())
    listed = {name: list(shape) for name, shape in shapes.items()}
    output.result(
        {"file": words[1], "parameters": count, "tensors": listed},
        text=f"{words[1]}: {len(shapes)} tensors, {count:,} parameters",
    )
    return ExitCode.DONE


def _to_hf(arguments: Arguments, output: Output) -> int:
    to = arguments.flags["--to"]
    if to == "peft":
        return _to_peft(arguments, output)
    if to != "hf":
        raise UserError(
            f"--to {to} is not known", fix="write --to hf FOLDER, or --to peft FOLDER for adapters"
        )
    words = arguments.words("a run", "a folder", example=f"{_RUN} --to hf FOLDER")
    from meshwright.trainer.trained.export_hf import export_hf

    dtype, chosen = arguments.flags.get("--dtype"), _chosen(arguments)
    with activity(f"writing {words[1]}"):
        exported = export_hf(*words, dtype=dtype, **chosen)
    assert exported is not None, "one process exports"
    output.result(
        {**asdict(exported), "folder": words[1]},
        text=f"{words[1]}: {exported.architecture}, {len(exported.tensors)} tensors, "
        f"{exported.parameters:,} parameters in {exported.dtype}",
    )
    return ExitCode.DONE


def _to_peft(arguments: Arguments, output: Output) -> int:
    words = arguments.words("a run", "a folder", example=f"{_RUN} --to peft FOLDER")
    from meshwright.trainer.trained.export_peft import export_peft

    with activity(f"writing {words[1]}"):
        names = export_peft(*words, **_chosen(arguments))
    text = f"{words[1]}: adapters of {len(names) // 2} layers"
    output.result({"folder": words[1], "tensors": names}, text=text)
    return ExitCode.DONE


def _chosen(arguments: Arguments) -> dict[str, Any]:
    """Return which checkpoint to export, and whether its averages."""
    text = arguments.flags.get("--step")
    if text is not None and not text.isdecimal():
        raise UserError(f"--step {text} is not a number", fix="write --step 100")
    return {
        "step": None if text is None else int(text),
        "which": arguments.flags.get("--which", "last"),
        "ema": arguments.has("--ema"),
    }
