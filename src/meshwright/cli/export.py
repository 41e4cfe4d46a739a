"""`meshwright export`: the parameters of a run as a safetensors file or a Hugging Face folder."""

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
        return _to_folder(arguments, output)
    if arguments.has("--dtype"):
        raise UserError("--dtype is for folders", fix="write --to hf FOLDER too")
    words = arguments.words("a run", "a file", example=f"{_RUN} model.safetensors")
    chosen = arguments.checkpoint
    with activity(f"writing {words[1]}"):
        shapes = export_safetensors(*words, **chosen)
    count = sum(math.prod(shape) for shape in shapes.values())
    listed = {name: list(shape) for name, shape in shapes.items()}
    output.result(
        {"file": words[1], "parameters": count, "tensors": listed},
        text=f"{words[1]}: {len(shapes)} tensors, {count:,} parameters",
    )
    return ExitCode.DONE


def _to_folder(arguments: Arguments, output: Output) -> int:
    to = arguments.flags["--to"]
    if to not in ("hf", "peft"):
        raise UserError(
            f"--to {to} is not known", fix="write --to hf FOLDER, or --to peft FOLDER for adapters"
        )
    words = arguments.words("a run", "a folder", example=f"{_RUN} --to {to} FOLDER")
    from meshwright.trainer.trained.export_hf import export_hf
    from meshwright.trainer.trained.export_peft import export_peft

    dtype, chosen = arguments.flags.get("--dtype"), arguments.checkpoint
    with activity(f"writing {words[1]}"):
        if to == "peft":
            names = export_peft(*words, **chosen)
            written: dict[str, Any] = {"tensors": names}
            text = f"adapters of {len(names) // 2} layers"
        else:
            exported = export_hf(*words, dtype=dtype, **chosen)
            assert exported is not None, "one process exports"
            written = asdict(exported)
            text = f"{exported.architecture}, {len(exported.tensors)} tensors, "
            text += f"{exported.parameters:,} parameters in {exported.dtype}"
    output.result({**written, "folder": words[1]}, text=f"{words[1]}: {text}")
    return ExitCode.DONE
