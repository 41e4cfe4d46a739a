"""Names and values of config.json that Llama, Qwen 3 and Gemma 3 share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.weights.family import HfConfig, TensorRow
from meshwright.weights.views import MATRIX, TRANSPOSED, VECTOR

_LAYER = "model.layers.{n}."

ROWS = (
    TensorRow("tokens.embedding", "model.embed_tokens.weight", MATRIX),
    TensorRow("norm.scale", "model.norm.weight", VECTOR),
    TensorRow("head.kernel", "lm_head.weight", TRANSPOSED),
    TensorRow("blocks.{n}.attention_norm.scale", _LAYER + "input_layernorm.weight", VECTOR),
    TensorRow("blocks.{n}.attention.query.kernel", _LAYER + "self_attn.q_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.attention.key.kernel", _LAYER + "self_attn.k_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.attention.value.kernel", _LAYER + "self_attn.v_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.attention.out.kernel", _LAYER + "self_attn.o_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.mlp.gate.kernel", _LAYER + "mlp.gate_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.mlp.up.kernel", _LAYER + "mlp.up_proj.weight", TRANSPOSED),
    TensorRow("blocks.{n}.mlp.down.kernel", _LAYER + "mlp.down_proj.weight", TRANSPOSED),
)
"""Norms around the MLP differ between the families; see each."""

HEAD_NORMS = (
    TensorRow("blocks.{n}.attention.query_norm.scale", _LAYER + "self_attn.q_norm.weight", VECTOR),
    TensorRow("blocks.{n}.attention.key_norm.scale", _LAYER + "self_attn.k_norm.weight", VECTOR),
)

MLP_NORM = TensorRow(
    "blocks.{n}.mlp_norm.scale", _LAYER + "post_attention_layernorm.weight", VECTOR
)

SPELLINGS = ((r"^(?=(layers|embed_tokens|norm)\.)", "model."),)
"""Files of a model without its head leave out the prefix."""

IGNORED = (r".*\.rotary_emb\.inv_freq",)

KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_blocks": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
"""Keys of config.json by argument."""


def longest_row(arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
    """Return how much the model can read, which training on shorter rows does not shorten."""
    key = "max_position_embeddings"
    return {key: max(arguments["context_length"], kept.get(key) or 0)}
