"""Llama, Mistral, Qwen 2 and 3, and Phi 3: their names and their config.json."""

from collections.abc import Mapping
from typing import Any

from meshwright.weights.config_values import (
    Key,
    WrongValue,
    only,
    rotary,
    scaling_numbers,
    without_effect,
)
from meshwright.weights.decoder_names import (
    ATTENTION,
    HEAD_NORMS,
    MLP_NORM,
    check_layer_types,
    decoder_family,
    refuse_uneven_heads,
)
from meshwright.weights.family import HfConfig, TensorRow
from meshwright.weights.views import VECTOR, StackedView, View

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
    settings = rotary(values, "default", "llama3")
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


_OURS = "blocks.{n}.attention."
_HEADS = ("query", "key", "value")
_KEYS = {"hidden_act": only("silu"), _CONTEXT: Key("size")}

LLAMA = decoder_family(
    kind="llama3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    rows=(MLP_NORM,),
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    unpublished={"sliding_window": ()},
    keys={**_KEYS, "mlp_bias": only(False)},
    other_architectures=("LlamaModel",),
)

MISTRAL = decoder_family(
    kind="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    rows=(MLP_NORM,),
    defaults={
        **_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    arguments=_arguments,
    config=_config,
    keys={
        **_KEYS,
        "num_key_value_heads": Key("size", 8, "num_kv_heads", null=True),
        "sliding_window": Key("size", 4096, "sliding_window", null=True),
    },
    other_architectures=("MistralModel",),
)


_FULL = "full_attention"
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN_KEYS = {
    "num_key_value_heads": Key("size", 32, "num_kv_heads", null=True),
    "hidden_act": only("silu"),
    "use_sliding_window": only(False),
    "layer_types": Key("list", null=True),
    **without_effect("sliding_window", "max_window_layers"),
}


def _qwen2_arguments(values: HfConfig) -> dict[str, Any]:
    check_layer_types(values, _FULL)
    return _arguments(values)


def _whole_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "layer_types": [_FULL] * arguments["num_blocks"]}


QWEN2 = decoder_family(
    kind="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rows=(
        MLP_NORM,
        *(
            TensorRow(f"{_OURS}{name}.bias", f"{ATTENTION}{name[0]}_proj.bias", VECTOR)
            for name in _HEADS
        ),
    ),
    defaults=_QWEN_DEFAULTS,
    arguments=_qwen2_arguments,
    config=lambda arguments: _config(arguments) | _whole_rows(arguments),
    unpublished={"sliding_window": ()},
    keys={**_KEYS, **_QWEN_KEYS, "use_mrope": only(False)},
    other_architectures=("Qwen2Model",),
)


def _qwen3_arguments(values: HfConfig) -> dict[str, Any]:
    settings = rotary(values, "default")
    check_layer_types(values, _FULL)
    return {"rope_base": settings["rope_theta"]}


def _qwen3_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": arguments["rope_base"], "rope_scaling": None}
    return {"hidden_act": "silu", "attention_bias": False, **_whole_rows(arguments), **rope}


QWEN3 = decoder_family(
    kind="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rows=(*HEAD_NORMS, MLP_NORM),
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    arguments=_qwen3_arguments,
    config=_qwen3_config,
    keys=_QWEN_KEYS,
    other_architectures=("Qwen3Model",),
)


def _phi3_arguments(values: HfConfig) -> dict[str, Any]:
    rotary(values, "default")
    return _arguments(values)


PHI3 = decoder_family(
    kind="phi3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    rows=(
        MLP_NORM,
        *(
            TensorRow(
                f"{_OURS}{name}.kernel",
                f"{ATTENTION}qkv_proj.weight",
                StackedView("", part, _HEADS),
            )
            for part, name in enumerate(_HEADS)
        ),
        *(
            TensorRow(
                f"blocks.{{n}}.mlp.{name}.kernel",
                "model.layers.{n}.mlp.gate_up_proj.weight",
                View("(2 o) i -> i o", part),
            )
            for part, name in enumerate(("gate", "up"))
        ),
    ),
    defaults={
        **_DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    arguments=_phi3_arguments,
    config=_config,
    unpublished={"rope_factor": (1,)},
    pad_token=32000,
    keys={
        **_KEYS,
        _CONTEXT: Key("size", 4096),
        # It may be missing, but not null.
        "head_dim": Key("size", None, "head_dim"),
        "sliding_window": Key("size", None, "sliding_window", null=True),
        # Rates of training, of which the model has only that of attention.
        "resid_pdrop": only(0.0, 0),
        "embd_pdrop": only(0.0, 0),
        # Names code in the folder, which neither transformers nor we run unasked.
        **without_effect("auto_map"),
    },
    sizes=lambda arguments: {
        "query": arguments["num_heads"] * arguments["head_dim"],
        **dict.fromkeys(_HEADS[1:], arguments["num_kv_heads"] * arguments["head_dim"]),
    },
    other_architectures=("Phi3Model",),
)
