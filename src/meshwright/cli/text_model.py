"""What `generate` and `eval` share: the model of a run or a folder, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import UserError
from meshwright.runtime.activity import activity
from meshwright.text.json_text import parse_json

if TYPE_CHECKING:
    from meshwright.generation.text_settings import TextSettings


def open_model(arguments: Arguments, path: str) -> tuple[Any, TextSettings]:
    """Load a model, and what its folder says about text."""
    from meshwright.launch.connect import connect_processes

    connect_processes(arguments.given_number("--simulate", most=1024))
    from meshwright.generation.text_settings import read_text_settings
    from meshwright.trainer.trained.load_model import load_model

    _check_folder(Path(path))
    if "--model" in arguments.flags:
        from meshwright.checkpoint import FOLDER
        from meshwright.config.builders import import_named
        from meshwright.weights.hf_folder import is_hf_folder

        if is_hf_folder(Path(path)) and not (Path(path) / FOLDER).exists():
            raise UserError(
                "--model is for runs of your own models",
                why=f"{path} holds a model of Hugging Face, which its config.json names",
                fix="leave --model out",
            )
        # A run may name code of the user's, which is only imported if the user names it too.
        name = arguments.flags["--model"]
        import_named(f"--model {name}", name)
    with activity(f"loading {path}"):
        model = load_model(path, **arguments.checkpoint)
    return model, read_text_settings(Path(path))


def number_format(
    arguments: Arguments, output: Output, settings: TextSettings, path: str
) -> str | None:
    """Return what to compute in; if a run or a folder decides, say so. None is float32."""
    if settings.dtype and not arguments.has("--dtype"):
        output.say(f"computing in {settings.dtype}, as {path} says; --dtype chooses another format")
    return arguments.flags.get("--dtype", settings.dtype)


def _check_folder(path: Path) -> None:
    """Refuse a folder that is not there, and name the newest run that is."""
    from meshwright.checkpoint import FOLDER
    from meshwright.config.groups import download_command

    if path.is_dir():
        return
    found = max(Path("outputs").glob(f"**/{FOLDER}"), key=lambda p: p.stat().st_mtime, default=None)
    newest = "" if found is None else f"; the newest run here is {found.parent}"
    raise UserError(
        f"there is no folder {path}",
        why="it is a file" if path.exists() else "generate and eval take a folder on this disk",
        fix=f"name a run's folder, or that of a downloaded model ({download_command(str(path))})"
        + newest,
    )


def decimal(arguments: Arguments, flag: str) -> float | None:
    """Return the value of a flag that takes a number; None without it."""
    text = arguments.flags.get(flag)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UserError(f"{flag} {text} is not a number", fix=f"write {flag} 0.9") from None


def read_text(path: Path) -> str:
    """Return the text of a file that the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}", why=str(error)) from error


def read_lines(path: Path, keys: Mapping[str, type], example: str) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines; each has one of some keys, of the right type.

    A line may also be a text, for the first key.
    """
    found: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        value = parse_json(line)
        value = {next(iter(keys)): value} if isinstance(value, str) else value
        own: dict[str, Any] = value if isinstance(value, dict) else {}
        if not any(isinstance(own.get(key), kind) for key, kind in keys.items()):
            raise UserError(
                f"line {number} of {path} cannot be used", why=line[:80], fix=f"write {example}"
            )
        found.append(own)
    if not found:
        raise UserError(f"{path} is empty", fix=f"write a line such as {example}")
    return found
