"""The families of published models, found by config.json or by the model's kind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.base import shorten
from meshwright.errors import Setting, UserError
from meshwright.weights.config_values import WrongValue, check_value, complete
from meshwright.weights.family import Family, HfConfig
from meshwright.weights.gemma3_names import GEMMA2, GEMMA3
from meshwright.weights.gpt2_names import GPT2
from meshwright.weights.hf_folder import CONFIG
from meshwright.weights.llama_names import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from meshwright.weights.vit_names import VIT

_ALL = (GPT2, GEMMA2, GEMMA3, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, VIT)
FAMILIES = {family.kind: family for family in _ALL}
"""By the model's kind."""


@dataclass(frozen=True)
class Architecture:
    """The family that a config.json describes, and the arguments of its model."""

    family: Family
    arguments: Mapping[str, Any]

    def refuse_contradictions(self, given: Mapping[str, Any], where: str, fix: str) -> None:
        """Refuse arguments that differ from config.json where they may not; None is the same."""
        differing = [
            f"{name} is {given[name]} here and {value} in {CONFIG}"
            for name, value in self.arguments.items()
            if name not in self.family.free and given.get(name) not in (None, value)
        ]
        if differing:
            raise UserError(
                f"the model is not the one in {where}", why="; ".join(differing), fix=fix
            )
        asked, longest = given.get("context_length"), self.arguments.get("context_length")
        if isinstance(asked, int) and isinstance(longest, int) and asked > longest:
            raise UserError(
                f"{Setting('model.context_length', asked)} is longer than the model reads",
                why=f"the {CONFIG} in {where} says {longest}",
                fix=f"write {Setting('model.context_length', longest)}, or less",
            )

    def with_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, some changed; ``dropout`` replaces all rates that are not given."""
        rates = dict.fromkeys(self.family.rates, changes.get("dropout"))
        return {**self.arguments, **(rates if "dropout" in changes else {}), **changes}

    @property
    def sizes(self) -> dict[str, int]:
        """Named dims of views that only the arguments tell."""
        return self.family.sizes(self.arguments)


def read_architecture(config: HfConfig, where: str) -> Architecture:
    """Return what the config.json of the folder ``where`` describes."""
    family = _find(config, where)
    inner: Any = config.get("text_config")
    parts = (config, inner) if isinstance(inner, Mapping) else (config,)
    quantized = next(filter(None, (part.get("quantization_config") for part in parts)), None)
    if isinstance(quantized, Mapping):
        raise UserError(
            f"the weights in {where} are quantized",
            why=f"its config.json says quant_method={quantized.get('quant_method')}",
            fix="choose the folder of the model before it was quantized",
        )
    try:
        return Architecture(family, family.read_config(text_model(config)))
    except WrongValue as error:
        raise _wrong(error, where) from None


def _find(config: HfConfig, where: str) -> Family:
    """Return the family of a config.json by its model_type, as transformers does, or by its class.

    A class that contradicts the type is refused: which of them is meant cannot be told.
    """
    names, kind = _architectures(config, where), config.get("model_type")
    for each in FAMILIES.values():
        known = set(names) <= set(each.architectures)
        if known and (kind in (each.model_type, each.outer_type) if kind else names):
            return each
    named = (", ".join(names) or "no class") + (f" of the model_type {kind}" if kind else "")
    raise UserError(
        f"the model in {where} is not known",
        why=f"its config.json says it is {named}; known: "
        + "; ".join(f"{', '.join(e.architectures)} ({e.model_type})" for e in FAMILIES.values()),
    )


def _architectures(config: HfConfig, where: str) -> list[str]:
    """Return the classes that a config.json names."""
    names = config.get("architectures")
    if isinstance(names, list | None) and all(isinstance(name, str) for name in names or ()):
        return names or []
    raise _wrong(WrongValue("architectures", names, "a list of names"), where)


def _wrong(error: WrongValue, where: str) -> UserError:
    """Return the message about a value of a config.json."""
    found = "null or missing" if error.value is None else shorten(json.dumps(error.value))
    return UserError(
        f"`{error.key}` in {Path(where) / CONFIG} is not valid",
        why=f"it is {found}, and has to be {error.expected}",
        fix="download the folder again, or correct the file",
    )


def text_model(config: HfConfig) -> HfConfig:
    """Return the config of the text model, which multimodal models have inside theirs.

    As in transformers, whether its embeddings are tied is what the outer one says.
    """
    family = next((each for each in FAMILIES.values() if _is_outer(each, config)), None)
    if family is None:
        return config
    own = complete(config, family.outer, family.architecture)
    inner = config.get("text_config")
    if inner is not None:
        check_value("text_config", inner, "object")
        check_value("tie_word_embeddings", inner.get("tie_word_embeddings", True), "flag")
    kept = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    return {**kept, **(inner or {}), "tie_word_embeddings": own["tie_word_embeddings"]}


_OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "torch_dtype")
"""Keys that a multimodal config.json has for the text model too."""


def _is_outer(family: Family, config: HfConfig) -> bool:
    kind = config.get("model_type", family.outer_type if "text_config" in config else None)
    return kind is not None and kind == family.outer_type


def find_family(kind: str) -> Family:
    """Return the family of a model kind; refuse kinds without a published form."""
    if kind in FAMILIES:
        return FAMILIES[kind]
    raise UserError(
        f"model.kind={kind} has no published form",
        why=f"weights of Hugging Face are read and written for {', '.join(FAMILIES)}",
    )
