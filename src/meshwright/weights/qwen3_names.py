"""Qwen 3: its names and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.weights.config_values import Key, only, refuse_other_scaling, rotary, without_effect
from meshwright.weights.decoder_names import HEAD_NORMS, MLP_NORM, check_layer_types, decoder_family
from meshwright.weights.family import HfConfig

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _arguments(values: HfConfig) -> dict[str, Any]:
    settings = rotary(values, 10_000.0)
    refuse_other_scaling(settings, "default")
    check_layer_types(values, "full_attention")
    return {"rope_base": settings["rope_theta"]}


def _config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * arguments["num_blocks"],
        "rope_theta": arguments["rope_base"],
        "rope_scaling": None,
    }


QWEN3 = decoder_family(
    kind="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rows=(*HEAD_NORMS, MLP_NORM),
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    keys={
        "num_key_value_heads": Key("size", 32, "num_kv_heads", null=True),
        "hidden_act": only("silu"),
        "use_sliding_window": only(False),
        "layer_types": Key("list", null=True),
        **without_effect("sliding_window", "max_window_layers"),
    },
    other_architectures=("Qwen3Model",),
)
