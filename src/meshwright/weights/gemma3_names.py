"""Gemma 2 and 3: their names and their config.json; of multimodal folders, the text model."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import (
    Key,
    WrongValue,
    check_value,
    only,
    refuse_other_scaling,
    rope_settings,
    rotary,
    scaling_numbers,
    without_effect,
)
from meshwright.weights.decoder_names import (
    HEAD_NORMS,
    check_layer_types,
    decoder_family,
    refuse_uneven_heads,
    refuse_unpublished,
)
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
}
"""The values of transformers, which multimodal folders leave out."""

_PATTERN = 6
_IMAGE = ("boi", "eoi", "image")
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

_LAYER = "model.layers.{n}."
_AFTER = _LAYER + "post_"

_NORMS = (
    TensorRow("blocks.{n}.attention_out_norm.scale", _AFTER + "attention_layernorm.weight", VECTOR),
    TensorRow("blocks.{n}.mlp_norm.scale", _LAYER + "pre_feedforward_layernorm.weight", VECTOR),
    TensorRow("blocks.{n}.mlp_out_norm.scale", _AFTER + "feedforward_layernorm.weight", VECTOR),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    refuse_uneven_heads(values)
    settings, local = _rotary(values)
    refuse_other_scaling(settings, "default", "linear")
    refuse_other_scaling(local, "default")
    numbers = scaling_numbers(settings, ["factor"] if settings["rope_type"] == "linear" else [])
    return {
        "global_every": _global_every(values),
        "rope_base": settings["rope_theta"],
        "rope_local_base": local["rope_theta"],
        "rope_factor": float(numbers.get("factor", 1)),
        "query_scale": float(values["query_pre_attn_scalar"]),
    }


def _rotary(values: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary settings of global and local blocks.

    As in transformers, ``rope_scaling`` completes those of global blocks, and the bases outside are
    for settings without one.
    """
    given = values["rope_parameters"]
    usual = {"rope_type": "default"}
    found = {_GLOBAL: usual, _LOCAL: usual} if given is None else dict(given)
    for key, each in found.items():
        if key not in (_GLOBAL, _LOCAL):
            raise WrongValue("rope_parameters", given, f"an object with {_GLOBAL} and {_LOCAL}")
        check_value(f"rope_parameters.{key}", usual if each is None else each, "object")
    scaling = values["rope_scaling"]
    if scaling:
        check_value(f"rope_parameters.{_GLOBAL}", found.get(_GLOBAL), "object")
        found[_GLOBAL] = {**found[_GLOBAL], **scaling}
    bases = values["rope_theta"] or 1_000_000.0, values["rope_local_base_freq"] or 10_000.0
    settings, local = (
        rope_settings(found.get(kind) or usual, base, f"rope_parameters.{kind}")
        for kind, base in zip((_GLOBAL, _LOCAL), bases, strict=True)
    )
    return settings, local


def _global_every(values: Mapping[str, Any]) -> int:
    """Return every how many blocks one is global; refuse other patterns."""
    types = check_layer_types(values, _LOCAL, _GLOBAL)
    if types is None:
        return values["sliding_window_pattern"]
    every = types.index(_GLOBAL) + 1 if _GLOBAL in types else len(types) + 1
    if types != _layer_types(every, len(types)):
        raise UserError(
            "this kind of Gemma is not supported",
            why=f"its config.json has layer_types={types}, and here every n-th block is {_GLOBAL}",
        )
    return every


def _gemma2_arguments(values: HfConfig) -> dict[str, Any]:
    refuse_uneven_heads(values)
    settings = rotary(values, "default")
    return {
        "global_every": _global_every({**values, "sliding_window_pattern": 2}),
        "rope_base": settings["rope_theta"],
        "rope_local_base": settings["rope_theta"],
        "rope_factor": 1.0,
        "query_scale": float(values["query_pre_attn_scalar"]),
    }


def _layer_types(every: int, count: int) -> list[str]:
    return [_LOCAL if number % every else _GLOBAL for number in range(1, count + 1)]


def _config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    factor = arguments["rope_factor"]
    return {
        **_shared_config(arguments),
        "sliding_window_pattern": arguments["global_every"],
        "rope_local_base_freq": arguments["rope_local_base"],
        "rope_scaling": None if factor == 1 else {"rope_type": "linear", "factor": factor},
    }


def _gemma2_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unpublished("Gemma2ForCausalLM", arguments, "rope_local_base", arguments["rope_base"])
    return _shared_config(arguments)


def _shared_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    scale = float(arguments.get("query_scale") or arguments["head_dim"])
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # transformers refuses 256.0 for 256.
        "query_pre_attn_scalar": int(scale) if scale.is_integer() else scale,
        "layer_types": _layer_types(arguments["global_every"], arguments["num_blocks"]),
        "rope_theta": arguments["rope_base"],
    }


_KEYS = {
    "hidden_activation": only("gelu_pytorch_tanh"),
    "use_bidirectional_attention": only(False, None),
    "query_pre_attn_scalar": Key("size", 256),
    "sliding_window": Key("size", 4096, "sliding_window"),
    "layer_types": Key("list", null=True),
}

GEMMA2 = decoder_family(
    kind="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    rows=_NORMS,
    defaults={**_DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192},
    arguments=_gemma2_arguments,
    config=_gemma2_config,
    unpublished={"rope_factor": (1,)},
    pad_token=0,
    keys={
        **_KEYS,
        "attn_logit_softcapping": Key("small", 50.0, "attention_softcap", null=True),
        "final_logit_softcapping": Key("small", 30.0, "logit_softcap", null=True),
        # Published files have it; the other key counts.
        **without_effect("hidden_act"),
    },
    other_architectures=("Gemma2Model",),
)


GEMMA3 = decoder_family(
    kind="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rows=(*HEAD_NORMS, *_NORMS),
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    unpublished={"attention_softcap": (), "logit_softcap": ()},
    pad_token=0,
    keys={
        **_KEYS,
        "attn_logit_softcapping": only(None),
        "final_logit_softcapping": only(None),
        "sliding_window_pattern": Key("size", _PATTERN),
        "rope_local_base_freq": Key("positive"),
        # transformers writes it, and does not read it.
        **without_effect("_sliding_window_pattern"),
    },
    outer_type="gemma3",
    outer={
        "tie_word_embeddings": Key("flag", True),
        "per_layer_config": only(None),
        "is_encoder_decoder": only(False),
        **without_effect("text_config", "vision_config", "mm_tokens_per_image", "pad_token_id"),
        **without_effect(*(f"{of}_token_{end}" for of in _IMAGE for end in ("id", "index"))),
    },
    other_architectures=("Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    spellings=((r"^(model\.language_model\.)", "model."), (r"^language_model\.", "")),
    skipped=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", "vision"),
)
