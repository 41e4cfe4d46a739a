"""What `generate` and `eval` share: the model of a run or a folder, and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import Arguments
from meshwright.errors import UserError
from meshwright.runtime.activity import activity

if TYPE_CHECKING:
    from meshwright.generation.text_settings import TextSettings


def open_model(arguments: Arguments, path: str) -> tuple[Any, TextSettings]:
    """Load a model, and what its folder says about text."""
    from meshwright.mesh.simulate import simulate_devices

    if arguments.has("--simulate"):
        simulate_devices(arguments.number("--simulate", 8, most=1024))
    from meshwright.generation.text_settings import read_text_settings
    from meshwright.trainer.trained.load_model import load_model

    step = arguments.number("--step", 1, most=2**31) if arguments.has("--step") else None
    with activity(f"loading {path}"):
        model = load_model(path, step=step, which=which(arguments), ema=arguments.has("--ema"))
    return model, read_text_settings(Path(path))


def which(arguments: Arguments) -> Any:
    """Return which checkpoint is meant: last or best."""
    return arguments.flags.get("--which", "last")


def decimal(arguments: Arguments, flag: str) -> float | None:
    """Return the value of a flag that takes a number; None without it."""
    text = arguments.flags.get(flag)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UserError(f"{flag} {text} is not a number", fix=f"write {flag} 0.9") from None
