"""Completing a config from the folder that model.weights names, before JAX starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.schema import Config
from meshwright.errors import ANY, Setting, UserError
from meshwright.weights.families import Architecture, find_family, read_architecture
from meshwright.weights.hf_folder import CONFIG, TOKENIZER, Folder, open_folder

KIND = "hf"
"""The kind of a model whose folder says what it is."""

BYTES_WITHOUT_TOKENIZER = (
    "text", "jsonl", "parquet", "array_record", "chat", "preference", "prompts", "sums",
)  # fmt: skip
"""Kinds of data whose text is read as bytes without a tokenizer."""

_TOKENIZED = (*BYTES_WITHOUT_TOKENIZER[:-1], "tokens", "mixture")
"""Kinds of data that take a tokenizer."""


@dataclass(frozen=True)
class Resolved:
    """A config completed from a folder, and the file that each added value comes from."""

    values: dict[str, Any]
    origins: dict[str, str]


def resolve_weights(values: Mapping[str, Any], *, saved: bool) -> Resolved:
    """Complete a composed config from the folder that ``model.weights`` names, if any.

    The model's kind and sizes are written out, so that the run can be loaded without the folder:
    a ``saved`` config may name one that is gone.
    """
    section = values.get("model")
    model: dict[str, Any] = dict(section) if isinstance(section, Mapping) else {}
    path, kind = model.get("weights"), str(model.get("kind"))
    if path is None:
        if kind == KIND:
            raise UserError(
                f"model={KIND} needs the folder of a model",
                why=f"{Setting('model.weights')} is not set",
                fix=f"write {Setting('model.weights', ANY)}, or choose another model",
            )
        return Resolved(dict(values), {})
    if model.get("init_from") is not None:
        raise UserError(
            f"{Setting('model.weights')} and {Setting('model.init_from')} are both set",
            why="training can start from one of them only",
        )
    if kind != KIND:
        find_family(kind)
    try:
        folder = open_folder(str(path))
    except UserError:
        if saved and kind != KIND:
            return Resolved(dict(values), {})
        raise
    architecture = read_architecture(folder.config, str(folder.path))
    _refuse_contradictions(model, architecture, folder)
    later = {*architecture.family.rates, "pad_token_id"}
    if saved and kind != KIND and architecture.arguments.keys() - later <= model.keys():
        # A run that has its arguments written out was not trained with others of the folder.
        return Resolved(dict(values), {})
    return _completed(values, model, architecture, folder)


def without_tokenizer(config: Config) -> list[str]:
    """Warn if text is read as bytes for a model that was trained on other tokens."""
    weights, data = config.model.weights, config.data
    has_one = data.arguments().get("tokenizer") is not None
    if weights is None or data.kind not in BYTES_WITHOUT_TOKENIZER or has_one:
        return []
    return [
        f"{weights} has no {TOKENIZER}, so every byte of the text is a token, which is not what "
        f"the model was trained on; write {Setting('data.tokenizer', ANY)} with its tokenizer"
    ]


def _completed(
    values: Mapping[str, Any], model: dict[str, Any], architecture: Architecture, folder: Folder
) -> Resolved:
    given = {key: value for key, value in model.items() if value is not None}
    found = {**architecture.with_changes(given), "kind": architecture.family.kind}
    file = str(folder.path / CONFIG)
    origins = {f"model.{key}": file for key in found if found[key] != model.get(key)}
    completed = {**values, "model": found}
    data: Any = values.get("data")
    if isinstance(data, Mapping) and data.get("kind") in _TOKENIZED and "tokenizer" not in data:
        tokenizer = folder.file(TOKENIZER)
        if tokenizer is not None:
            completed["data"] = {**data, "tokenizer": str(tokenizer)}
            origins["data.tokenizer"] = str(tokenizer)
    return Resolved(completed, origins)


def _refuse_contradictions(
    model: Mapping[str, Any], architecture: Architecture, folder: Folder
) -> None:
    family, file = architecture.family, folder.path / CONFIG
    if model["kind"] not in (KIND, family.kind):
        raise UserError(
            f"{Setting('model.weights', str(folder.path))} is another kind of model",
            why=f"the config has model.kind={model['kind']}, and {file} describes "
            f"{family.architecture}, which is model.kind={family.kind}",
            fix=f"write model={KIND} to take the kind and the sizes from the folder",
        )
    fix = f"write model={KIND} to take all sizes from the folder, and leave these out"
    architecture.refuse_contradictions(model, str(folder.path), fix)
