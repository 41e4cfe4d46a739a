"""The config.json of published models describes the models of the config groups."""

import pytest
import yaml

from meshwright.config.groups import CONF_DIR
from meshwright.errors import UserError
from meshwright.weights.families import FAMILIES, read_architecture
from meshwright.weights.kept import published_config

GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
VIT_B = {
    "architectures": ["ViTForImageClassification"],
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "id2label": {str(n): f"class {n}" for n in range(1000)},
    "image_size": 224,
    "model_type": "vit",
    "qkv_bias": True,
}
GPT2_MEDIUM = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1024,
    "n_head": 16,
    "n_layer": 24,
    "n_special": 0,
    "predict_special_tokens": True,
    "vocab_size": 50257,
}

PUBLISHED = {
    "gemma3_1b": GEMMA3_1B,
    "gemma3_4b": GEMMA3_4B,
    "llama3_1b": LLAMA_1B,
    "qwen3_0.6b": QWEN3_06B,
    "mistral_7b": MISTRAL_7B,
    "qwen2.5_0.5b": QWEN25_05B,
    "gemma2_2b": GEMMA2_2B,
    "phi3_mini": PHI3_MINI,
    "vit_b": VIT_B,
    "gpt2_medium": GPT2_MEDIUM,
}


def group(name):
    values = yaml.safe_load((CONF_DIR / "model" / f"{name}.yaml").read_text())
    values.pop("defaults", None)
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_describes_the_model_of_its_name(name):
    ours = group(name)
    found = read_architecture(PUBLISHED[name], "the folder")
    assert found.family.kind == ours.pop("kind")
    assert {key: found.arguments[key] for key in ours} == ours


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_exported_config_describes_the_same_model(name):
    found = read_architecture(PUBLISHED[name], "the folder")
    exported = published_config(found.family.kind, found.arguments, PUBLISHED[name])
    assert "text_config" not in exported
    assert exported["architectures"] == [found.family.architecture]
    again = read_architecture(exported, "the export")
    assert (again.family, again.arguments) == (found.family, found.arguments)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("llama3_1b", "sliding_window", 128),
        ("qwen2.5_0.5b", "sliding_window", 128),
        ("phi3_mini", "rope_factor", 8.0),
        ("gemma2_2b", "rope_local_base", 1e6),
        ("gemma3_1b", "attention_softcap", 50.0),
        ("gemma3_1b", "logit_softcap", 30.0),
    ],
)
def test_what_a_published_form_cannot_say_is_refused(name, argument, value):
    found = read_architecture(PUBLISHED[name], "the folder")
    changed = {**found.arguments, argument: value}
    with pytest.raises(UserError, match=f"not a {found.family.architecture}") as error:
        published_config(found.family.kind, changed, {})
    assert f"{argument}={value}" in error.value.why


def test_shorter_rows_do_not_shorten_the_exported_model():
    found = read_architecture(GEMMA3_1B, "the folder")
    shorter = {**found.arguments, "context_length": 512}
    assert published_config("gemma3", shorter, GEMMA3_1B)["max_position_embeddings"] == 32768
    assert published_config("gemma3", shorter, {})["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3_1b", {"attention_bias": True}, "attention_bias=True"),
        ("llama3_1b", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type yarn"),
        ("qwen3_0.6b", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("gemma3_1b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma2_2b", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "type linear"),
        ("mistral_7b", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type yarn"),
        ("phi3_mini", {"rope_scaling": {"type": "longrope"}}, "type longrope"),
        ("phi3_mini", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
        ("qwen2.5_0.5b", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("gemma3_1b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gpt2_medium", {"n_inner": 100}, "n_inner=100"),
        ("vit_b", {"image_size": [224, 112]}, r"image_size=\[224, 112\]"),
        ("vit_b", {"qkv_bias": False}, "qkv_bias=False"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(name, change, message):
    with pytest.raises(UserError, match=message):
        read_architecture({**PUBLISHED[name], **change}, "the folder")


@pytest.mark.parametrize(
    "config", [{"architectures": ["MambaForCausalLM"]}, {"model_type": "mamba"}, {}]
)
def test_an_unknown_architecture_lists_the_known_ones(config):
    with pytest.raises(UserError, match="is not known") as error:
        read_architecture(config, "the folder")
    assert all(family.architecture in error.value.why for family in FAMILIES.values())
