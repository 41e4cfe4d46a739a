"""Gemma 3: its names and its config.json; of multimodal folders, the text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import refuse_other_scaling, rotary, scaling_numbers
from meshwright.weights.decoder_names import HEAD_NORMS, decoder_family
from meshwright.weights.family import HfConfig, TensorRow
from meshwright.weights.views import VECTOR

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
}
"""The values of transformers, which multimodal folders leave out."""

_PATTERN = 6
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

_LAYER = "model.layers.{n}."
_AFTER = _LAYER + "post_"

_NORMS = (
    TensorRow("blocks.{n}.attention_out_norm.scale", _AFTER + "attention_layernorm.weight", VECTOR),
    TensorRow("blocks.{n}.mlp_norm.scale", _LAYER + "pre_feedforward_layernorm.weight", VECTOR),
    TensorRow("blocks.{n}.mlp_out_norm.scale", _AFTER + "feedforward_layernorm.weight", VECTOR),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    settings = rotary(values, 1_000_000.0)
    local = rotary(values, 10_000.0, layers=_LOCAL, base_key="rope_local_base_freq")
    refuse_other_scaling(settings, "default", "linear")
    refuse_other_scaling(local, "default")
    numbers = scaling_numbers(settings, ["factor"] if settings["rope_type"] == "linear" else [])
    return {
        "sliding_window": values["sliding_window"],
        "global_every": _global_every(values),
        "rope_base": settings["rope_theta"],
        "rope_local_base": local["rope_theta"],
        "rope_factor": float(numbers.get("factor", 1)),
        "query_scale": values["query_pre_attn_scalar"],
    }


def _global_every(values: Mapping[str, Any]) -> int:
    """Return every how many blocks one is global; refuse other patterns."""
    every = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", _PATTERN))
    types = values.get("layer_types")
    if types is None:
        return every
    if _GLOBAL in types:
        every = types.index(_GLOBAL) + 1
    if types != _layer_types(every, len(types)):
        raise UserError(
            "this Gemma3ForCausalLM is not supported",
            why=f"its config.json has layer_types={types}, and in model.kind=gemma3 every n-th "
            f"block is {_GLOBAL}",
        )
    return every


def _layer_types(every: int, count: int) -> list[str]:
    return [_LOCAL if number % every else _GLOBAL for number in range(1, count + 1)]


def _config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    every, factor = arguments["global_every"], arguments["rope_factor"]
    scale = float(arguments.get("query_scale") or arguments["head_dim"])
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # transformers refuses 256.0 for 256.
        "query_pre_attn_scalar": int(scale) if scale.is_integer() else scale,
        "sliding_window": arguments["sliding_window"],
        "sliding_window_pattern": every,
        "layer_types": _layer_types(every, arguments["num_blocks"]),
        "rope_theta": arguments["rope_base"],
        "rope_local_base_freq": arguments["rope_local_base"],
        "rope_scaling": None if factor == 1 else {"rope_type": "linear", "factor": factor},
    }


GEMMA3 = decoder_family(
    kind="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rows=(*HEAD_NORMS, *_NORMS),
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    supported={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    optional={
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": _PATTERN,
        "_sliding_window_pattern": _PATTERN,
        "layer_types": [_LOCAL, _GLOBAL],
    },
    other_architectures=("Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    spellings=((r"^(model\.language_model\.)", "model."), (r"^language_model\.", "")),
    skipped=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", "vision"),
)
