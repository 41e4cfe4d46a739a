"""Folders and names of Hugging Face where the name of a model is expected."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.errors import UserError

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def refuse_folder(choice: str) -> None:
    """Refuse ``model=…`` with a folder or a name of Hugging Face, saying what to write instead.

    Returns for any other choice.
    """
    folder = Path(choice).expanduser()
    if (folder / "checkpoints").is_dir():
        raise UserError(
            f"`model={choice}` is a run folder",
            fix=f"write model.init_from={choice} to start from its parameters, or "
            f"hydra.run.dir={choice} to continue it",
        )
    if (folder / "config.json").is_file():
        raise UserError(
            f"`model={choice}` is a folder of weights",
            fix=f"write model=hf model.weights={choice}",
        )
    if is_hub_name(choice):
        name = choice.rpartition("/")[2]
        raise UserError(
            f"there is no `model={choice}`",
            why="models of Hugging Face are read from folders, and nothing is downloaded",
            fix=f"get the folder with {download_command(choice)}, and write model=hf "
            f"model.weights={name}",
        )


def is_hub_name(text: str) -> bool:
    """Whether a text could be a name at Hugging Face, such as ``google/gemma-3-1b``."""
    return _HUB_NAME.fullmatch(text) is not None


def download_command(name: str) -> str:
    """Return the command that downloads a model, or any one if this is not the name of one."""
    if is_hub_name(name):
        return f"hf download {name} --local-dir {name.rpartition('/')[2]}"
    return "hf download NAME --local-dir FOLDER"
