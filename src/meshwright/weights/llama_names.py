"""Llama: its names and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.weights.config_values import refuse_other_scaling, rotary, scaling_numbers
from meshwright.weights.decoder_names import MLP_NORM, decoder_family
from meshwright.weights.family import HfConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
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


def _arguments(values: HfConfig) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    settings = rotary(values, 10_000.0)
    refuse_other_scaling(settings, "default", "llama3")
    scaled = {} if settings["rope_type"] == "default" else _SCALING
    numbers = scaling_numbers(settings, scaled.values())
    return {
        "num_kv_heads": values.get("num_key_value_heads", heads),
        "head_dim": values.get("head_dim", values["hidden_size"] // heads),
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
    supported={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    optional={"num_key_value_heads": 8, "head_dim": 128},
    other_architectures=("LlamaModel",),
)
