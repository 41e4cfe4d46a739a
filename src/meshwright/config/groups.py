"""The config groups with their files, and what else may be written where a file is chosen."""

import re
from pathlib import Path

from meshwright.errors import UserError

CONF_DIR = Path(__file__).parent.parent / "conf"

GROUPS = (
    "model", "task", "data", "optimizer", "training", "mesh", "sharding", "pipeline",
    "precision", "checkpoint", "tracking", "run", "grpo", "generation", "experiment",
)  # fmt: skip


def group_options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """List the files of every group, including the user's own."""
    roots = [CONF_DIR, *([config_dir] if config_dir else [])]
    return {
        group: sorted({f.stem for root in roots for f in (root / group).glob("*.yaml")})
        for group in GROUPS
    }


_MESH = re.compile(r"""\+{0,2}mesh=(['"]?)(\w+=-?\d+(?:\s*,\s*\w+=-?\d+)*)\1""")
_OWN_KIND = re.compile(r"\+{0,2}(model|task|data|optimizer)=([\w.]+:[\w.]+)")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_PLAIN_NAME = re.compile(r"\w[\w.-]*")


def refuse_folder(choice: str) -> None:
    """Refuse ``model=…`` with a folder or a Hugging Face name, and say what to write instead.

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
            f"`model={choice}` is a folder of weights", fix=f"write model=hf model.weights={choice}"
        )
    if is_hub_name(choice):
        name = choice.rpartition("/")[2]
        raise UserError(
            f"there is no `model={choice}`",
            why="Hugging Face models are read from folders; nothing is downloaded",
            fix=f"download it with {download_command(choice)}, then write model=hf "
            f"model.weights={name}",
        )


def is_hub_name(text: str) -> bool:
    """Whether a text could be a Hugging Face name, such as ``google/gemma-3-1b``."""
    return _HUB_NAME.fullmatch(text) is not None


def download_command(name: str) -> str:
    """Return the command that downloads a model, with placeholders if this is not a name."""
    if is_hub_name(name) or _PLAIN_NAME.fullmatch(name):
        return f"hf download {name} --local-dir {name.rpartition('/')[2]}"
    return "hf download NAME --local-dir FOLDER"


def expand_shorthands(text: str) -> list[str]:
    """Return the overrides that one stands for.

    ``mesh=fsdp=4,tensor=2`` is how Python writes a mesh, and ``model=package.module:Net`` names a
    builder where a file is expected.
    """
    if mesh := _MESH.fullmatch(text):
        return [f"mesh.{part.strip()}" for part in mesh[2].split(",")]
    kind = _OWN_KIND.fullmatch(text)
    return [f"{kind[1]}.kind={kind[2]}"] if kind else [text]
