"""What a run remembers of the folder its weights came from, so that an export has it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.builders import defaults_of
from meshwright.models import find_builder
from meshwright.weights.families import find_family, text_model
from meshwright.weights.family import HfConfig
from meshwright.weights.hf_folder import CONFIG, KEPT, TOKENIZER, Folder

HF_FOLDER = "hf"
"""The folder for these files in a run folder."""

KeptFiles = Mapping[str, str]
"""Contents of files by name."""

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

_RESPELLED = (
    "rope_parameters",
    "dtype",
    "_sliding_window_pattern",
    "original_max_position_embeddings",
)
"""Keys that an export writes in another spelling, which transformers 4 reads too."""


def keep_files(
    folder: Folder | None, *, tokenizer: str | None = None, config: HfConfig | None = None
) -> dict[str, str]:
    """Return the files to remember: the folder's, the tokenizer's, and another config.json."""
    files = {} if folder is None else folder.kept_files()
    if config is not None:
        files[CONFIG] = json.dumps({**json.loads(files.get(CONFIG, "{}")), **config}, indent=2)
    if tokenizer is None:
        return files
    path = Path(tokenizer)
    text = (path / TOKENIZER if path.is_dir() else path).read_text(encoding="utf-8")
    if text != files.get(TOKENIZER):
        files = {name: own for name, own in files.items() if name not in _TOKENIZER_FILES}
    return {**files, TOKENIZER: text}


def read_kept(folder: Path) -> dict[str, str]:
    """Read the files that a run remembers from its run folder."""
    paths = (folder / HF_FOLDER / name for name in (CONFIG, *KEPT))
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def published_config(kind: str, arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
    """Return the config.json of a model; ``kept`` is the one that its weights came with, if any."""
    family = find_family(kind)
    named = family.own_names(text_model(kept))
    before = {key: value for key, value in named.items() if key not in _RESPELLED}
    own = family.write_config(with_defaults(kind, arguments), before)
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    return {**before, **own, **names}


def token_ids(kept: KeptFiles) -> dict[str, int | None]:
    """Return the tokens around a text for config.json; None, or transformers would take others."""
    names, tokenizer = (json.loads(kept.get(n, "{}")) for n in (_TOKENIZER_FILES[0], TOKENIZER))
    words = tokenizer.get("model", {}).get("vocab")
    ids = dict(words) if isinstance(words, dict) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    return {f"{name}_id": ids.get(names.get(name)) for name in ("bos_token", "eos_token")}


def with_defaults(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model with the defaults of those that are not given."""
    return {**defaults_of(find_builder(kind)), **arguments}
