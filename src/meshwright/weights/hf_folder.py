"""A Hugging Face folder: its config, its tensors by name, and its other files."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.config.groups import download_command
from meshwright.errors import Setting, UserError, first_line
from meshwright.text.units import a_type
from meshwright.weights.family import HfConfig
from meshwright.weights.safetensors_format import DTYPES, Tensor, read_header

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"

KEPT = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    GENERATION, "preprocessor_config.json",
)  # fmt: skip
"""Files that a run remembers besides config.json, so that an export has them."""

_AGAIN = "download the folder again"

SHOWN = 4
"""Names that a message lists of each kind."""


@dataclass(frozen=True)
class Folder:
    """A folder with the weights of a published model, and its config.json."""

    path: Path
    config: HfConfig

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name; only the headers of its files are read."""
        # As in transformers, an index beside the file is not read.
        if self.file(SINGLE) is not None:
            return read_header(self.path / SINGLE)
        if self.file(INDEX) is not None:
            return self._indexed()
        others = sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".h5"))
        raise UserError(
            f"there are no weights in {self.path}",
            why=f"it has neither {SINGLE} nor {INDEX}"
            + (f", only {listed(others)}" if others else ""),
            fix="save them as safetensors first: model.save_pretrained(folder)" if others else "",
        )

    @cached_property
    def dtype(self) -> str:
        """The number format of most of its tensors, as NumPy names it."""
        counts = Counter(tensor.dtype for tensor in self.tensors.values() if tensor.shape)
        name = next((name for name, _ in counts.most_common() if name in DTYPES), "F32")
        return DTYPES[name].name

    def file(self, name: str) -> Path | None:
        """Return a file of the folder, None if there is none; refuse one that is outside of it.

        Links may lead to the files of Hugging Face's cache, whose folders consist of such links.
        """
        path, home = self.path / name, self.path.resolve()
        places = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
        real = path.resolve()
        if not any(real.is_relative_to(place) for place in places):
            raise UserError(
                f"{path} is not in its folder",
                why=f"it is {real}",
                fix="copy the file into the folder if you trust its origin",
            )
        return path if real.is_file() else None

    def text(self, name: str) -> str | None:
        """Return the content of a text file; None if the folder does not have it."""
        file = self.file(name)
        try:
            return None if file is None else file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.path / name}", why=first_line(error)) from error

    def kept_files(self) -> dict[str, str]:
        """Return what a run remembers of the folder, by file name."""
        config = {key: value for key, value in self.config.items() if key != "dtype"}
        files = {CONFIG: json.dumps({**config, "torch_dtype": self.dtype}, indent=2)}
        return files | {name: text for name in KEPT if (text := self.text(name)) is not None}

    def _indexed(self) -> dict[str, Tensor]:
        index = self.path / INDEX
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise UserError(f"{index} is not an index", why="it has no weight_map")
        names = sorted({str(file) for file in files.values()})
        missing = [name for name in names if self.file(name) is None]
        if missing:
            raise UserError(
                f"{len(missing)} of the {len(names)} files of weights are missing in {self.path}",
                why=f"{INDEX} names {listed(missing)}",
                fix=_AGAIN,
            )
        headers = {file: read_header(self.path / file) for file in names}
        found = {(name, file): t for file in names for name, t in headers[file].items()}
        wanted = {(name, str(file)) for name, file in files.items()}
        differing = {"not found": wanted - found.keys(), "not in the index": found.keys() - wanted}
        reasons = [
            f"{what}: {listed([f'`{name}` in {file}' for name, file in sorted(each)], quote='')}"
            for what, each in differing.items()
            if each
        ]
        if reasons:
            raise UserError(
                f"the files in {self.path} do not have the tensors of {INDEX}",
                why="; ".join(reasons),
                fix=_AGAIN,
            )
        return {name: tensor for (name, _), tensor in found.items()}


def open_folder(path: str | Path) -> Folder:
    """Open a folder and read its config.json."""
    folder = Path(path).expanduser()
    setting = Setting("model.weights", str(path))
    if not folder.is_dir():
        raise UserError(
            f"{setting} is not a folder",
            why=f"{folder.absolute()} is a file" if folder.exists() else f"there is no {folder}",
            fix=f"download the model first ({download_command(str(path))}), and name its folder; a "
            "run that started from it resumes with --config RUN/config.yaml",
        )
    opened = Folder(folder, {})
    config = opened.file(CONFIG)
    if config is None:
        raise UserError(
            f"{setting} is not the folder of a model",
            why=f"it has no {CONFIG}",
            fix="name a folder with config.json and model.safetensors; a run's own parameters are "
            f"taken with {Setting('model.init_from')}",
        )
    return replace(opened, config=_read_json(config))


def is_hf_folder(path: Path) -> bool:
    """Whether a folder has the config.json of a published model; a run's folder may have it too."""
    return (path / CONFIG).is_file()


def listed(names: Sequence[str], quote: str = "`") -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - SHOWN
    shown = ", ".join(f"{quote}{name}{quote}" for name in names[:SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON file of a folder, which holds an object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}", why=first_line(error), fix=_AGAIN) from error
    if not isinstance(values, dict):
        why = f"it holds {a_type(values)} instead of an object with keys"
        raise UserError(f"cannot read {file}", why=why, fix=_AGAIN)
    return values


def describe_differences(
    have: Mapping[str, Sequence[int]],
    need: Mapping[str, Sequence[int]],
    where: str = "in the checkpoint",
) -> list[str]:
    """Describe how saved arrays differ from those of a model: missing, additional, other shapes."""
    shapes = [
        f"`{path}` is {list(have[path])} and should be {list(need[path])}"
        for path in need
        if path in have and tuple(have[path]) != tuple(need[path])
    ]
    kinds = {
        f"not {where}": listed([path for path in need if path not in have]),
        "not in the model": listed([path for path in have if path not in need]),
        "other shapes": listed(shapes, quote=""),
    }
    return [f"{kind}: {names}" for kind, names in kinds.items() if names]
