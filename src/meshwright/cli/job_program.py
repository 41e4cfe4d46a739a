"""Checks what a job of a cluster runs, so that a mistake shows before it waits in a queue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.arguments import Arguments, parse_arguments
from meshwright.launch.options import LaunchOptions

if TYPE_CHECKING:
    from meshwright.config.compose import Composed
    from meshwright.config.schema import Config


def check_program(options: LaunchOptions, *, in_image: bool) -> Composed | None:
    """Raise if the program of a job is no command, or the config of a training has a mistake.

    Args:
        options: what to launch.
        in_image: whether the job has files of its own, so that those it names need not be here.

    Returns:
        The config of a training; None for other programs, or if the config is in the image.
    """
    if not options.is_own_command:
        return None
    arguments = parse_arguments(options.program)
    if arguments.command.name != "train":
        return None
    return _image_config(arguments) if in_image else _config(arguments)


def _config(arguments: Arguments) -> Composed:
    from meshwright.cli.request import compose
    from meshwright.config.compose import validate

    composed = compose(arguments)
    _check_modules(validate(composed))
    return composed


def _image_config(arguments: Arguments) -> Composed | None:
    """Check the config of a training as far as its files are here."""
    from meshwright.cli.request import compose
    from meshwright.config.compose import compose_config, validate

    for flag in ("--config-dir", "--config"):
        path = arguments.flags.get(flag)
        if path and not Path(path).exists():
            print(
                f"remark: the config is not checked, because {flag} {path} is not on this machine",
                file=sys.stderr,
            )
            return None
    composed = compose_config(arguments.overrides, arguments.config_dir, arguments.config_file)
    model = composed.values.get("model")
    weights = model.get("weights") if isinstance(model, dict) else None
    named = [path for path in (weights, composed.values.get("plan")) if path is not None]
    if all(Path(str(path)).exists() for path in named):
        composed = compose(arguments)
    validate(composed)
    return composed


def _check_modules(config: Config) -> None:
    """Raise if a module of the user's own that the config names does not exist here."""
    from meshwright.config.builders import check_module_exists

    training = config.training
    kinds = {
        f"{name}.kind": getattr(config, name).kind
        for name in ("model", "task", "data", "optimizer")
    }
    for key, kind in {**kinds, "training.eval_loss": training.eval_loss}.items():
        if kind is not None and ":" in kind:
            check_module_exists(f"{key}={kind}", kind)
    for name in training.callbacks:
        check_module_exists(f"training.callbacks=[{name}]", name)
