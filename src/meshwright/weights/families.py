"""The families of published models, found by config.json or by the model's kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.base import shorten
from meshwright.errors import Setting, UserError
from meshwright.weights.config_values import WrongValue
from meshwright.weights.family import Family, HfConfig
from meshwright.weights.gemma3_names import GEMMA3
from meshwright.weights.gpt2_names import GPT2
from meshwright.weights.hf_folder import CONFIG
from meshwright.weights.llama_names import LLAMA
from meshwright.weights.qwen3_names import QWEN3
from meshwright.weights.vit_names import VIT

FAMILIES = {family.kind: family for family in (GPT2, GEMMA3, LLAMA, QWEN3, VIT)}
"""By the model's kind."""


@dataclass(frozen=True)
class Architecture:
    """What a config.json describes.

    Attributes:
        family: the family.
        arguments: the arguments of its model.
    """

    family: Family
    arguments: Mapping[str, Any]

    def refuse_contradictions(self, given: Mapping[str, Any], where: str, fix: str) -> None:
        """Refuse arguments that differ from config.json where they may not.

        Args:
            given: arguments of the model; None stands for what config.json says.
            where: its folder, for messages.
            fix: what to write instead.
        """
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

    @property
    def sizes(self) -> dict[str, int]:
        """Named dims of views that only the arguments tell."""
        return self.family.sizes(self.arguments)


def read_architecture(config: HfConfig, where: str) -> Architecture:
    """Return what a config.json describes.

    Args:
        config: its content.
        where: its folder, for messages.
    """
    names = _architectures(config, where)
    family = next((each for each in FAMILIES.values() if _describes(each, names, config)), None)
    if family is None:
        named = ", ".join(names) or f"of the model_type {config.get('model_type')}"
        raise UserError(
            f"the model in {where} is not known",
            why=f"its config.json says it is {named}; known: "
            + ", ".join(
                name
                for each in FAMILIES.values()
                for name in (each.architecture, *each.other_architectures)
            ),
        )
    own = text_model(config)
    if own is config and config.get("text_config") is not None:
        raise _wrong(WrongValue("text_config", config["text_config"], "an object with keys"), where)
    quantized = config.get("quantization_config") or own.get("quantization_config")
    if isinstance(quantized, Mapping):
        raise UserError(
            f"the weights in {where} are quantized",
            why=f"its config.json says quant_method={quantized.get('quant_method')}",
            fix="choose the folder of the model before it was quantized",
        )
    try:
        return Architecture(family, family.read_config(own))
    except WrongValue as error:
        raise _wrong(error, where) from None


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
    """Return the config of the text model, which multimodal models have inside theirs."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {key: value for key, value in config.items() if key in _OF_THE_WHOLE}
    return {**outer, **inner}


_OF_THE_WHOLE = (
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "torch_dtype",
    "tie_word_embeddings",
)
"""Keys that a multimodal config.json has for the text model too."""


def find_family(kind: str) -> Family:
    """Return the family of a model kind; refuse kinds without a published form."""
    if kind in FAMILIES:
        return FAMILIES[kind]
    raise UserError(
        f"model.kind={kind} has no published form",
        why=f"weights of Hugging Face are read and written for {', '.join(FAMILIES)}",
    )


def _describes(family: Family, names: list[str], config: HfConfig) -> bool:
    if names:
        return any(name in (family.architecture, *family.other_architectures) for name in names)
    return config.get("model_type") == family.model_type
