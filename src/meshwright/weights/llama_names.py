"""Llama: its names and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.weights.config_values import (
    Key,
    WrongValue,
    only,
    refuse_other_scaling,
    rotary,
    scaling_numbers,
)
from meshwright.weights.decoder_names import MLP_NORM, decoder_family, refuse_uneven_heads
from meshwright.weights.family import HfConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_SCALING = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}

_CONTEXT = "original_max_position_embeddings"


def _arguments(values: HfConfig) -> dict[str, Any]:
    refuse_uneven_heads(values)
    settings = rotary(values, 10_000.0)
    refuse_other_scaling(settings, "default", "llama3")
    scaled = {} if settings["rope_type"] == "default" else _SCALING
    # As in transformers, a context outside counts more than one inside, and is the whole if neither
    # is given.
    outside, whole = values[_CONTEXT], values["max_position_embeddings"]
    settings[_CONTEXT] = settings.get(_CONTEXT, whole) if outside is None else outside
    numbers = scaling_numbers(settings, scaled.values())
    low, high = numbers.get("low_freq_factor", 0), numbers.get("high_freq_factor", 1)
    if low >= high:
        raise WrongValue("rope_scaling.high_freq_factor", high, f"above low_freq_factor={low}")
    return {
        "rope_base": settings["rope_theta"],
        "rope_factor": 1.0,
        **{argument: numbers[key] for argument, key in scaled.items()},
    }


def _config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    factor = arguments.get("rope_factor")
    scaling = {key: arguments[argument] for argument, key in _SCALING.items()}
    return {
        "hidden_act": "silu",
        "rope_theta": arguments["rope_base"],
        "rope_scaling": None if factor in (None, 1) else {"rope_type": "llama3", **scaling},
    }


LLAMA = decoder_family(
    kind="llama3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    rows=(MLP_NORM,),
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    keys={"hidden_act": only("silu"), "mlp_bias": only(False), _CONTEXT: Key("size")},
    other_architectures=("LlamaModel",),
)
