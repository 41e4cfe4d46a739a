"""What the families Llama, Qwen 3 and Gemma 3 share: names, and values of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.weights.config_values import ROTARY
from meshwright.weights.family import Family, HfConfig, TensorRow
from meshwright.weights.views import MATRIX, TRANSPOSED, VECTOR

_LAYER = "model.layers.{n}."

_ROWS = (
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

_SPELLINGS = ((r"^(?=(layers|embed_tokens|norm)\.)", "model."),)
"""Files of a model without its head leave out the prefix."""

_KEYS = {
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


def decoder_family(
    *,
    rows: tuple[TensorRow, ...],
    config: Callable[[Mapping[str, Any]], dict[str, Any]],
    spellings: tuple[tuple[str, str], ...] = (),
    optional: Mapping[str, Any] | None = None,
    **own: Any,
) -> Family:
    """Return a family of decoders: what they share, completed by what is its own.

    Args:
        rows: its further rows.
        config: from the arguments of the model to its further values of config.json.
        spellings: its further spellings of names.
        optional: its further keys without a default.
        own: other fields of `Family`.
    """

    def whole_config(arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
        # Training on shorter rows does not shorten what the model can read.
        key = "max_position_embeddings"
        return {key: max(arguments["context_length"], kept.get(key) or 0)} | config(arguments)

    return Family(
        rows=(*_ROWS, *rows),
        keys=_KEYS,
        config=whole_config,
        optional={**ROTARY, **(optional or {})},
        spellings=(*spellings, *_SPELLINGS),
        ignored=(r".*\.rotary_emb\.inv_freq",),
        free=("context_length",),
        **own,
    )
