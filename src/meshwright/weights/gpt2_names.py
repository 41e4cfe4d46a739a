"""GPT-2: its names and its config.json. Kernels are stored as [in, out]."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import Key, only, without_effect
from meshwright.weights.family import Family, HfConfig, TensorRow, layer_rows, norm_rows
from meshwright.weights.views import MATRIX, TRANSPOSED, View

_KEYS = {
    "vocab_size": Key("size", 50257, "vocab_size"),
    "n_positions": Key("size", 1024, "context_length"),
    "n_embd": Key("size", 768, "hidden_size"),
    "n_layer": Key("size", 12, "num_blocks"),
    "n_head": Key("size", 12, "num_heads"),
    "tie_word_embeddings": Key("flag", True, "tied_embeddings"),
    "resid_pdrop": Key("rate", 0.1, "dropout"),
    "embd_pdrop": Key("rate", 0.1, "embedding_dropout"),
    "attn_pdrop": Key("rate", 0.1, "attention_dropout"),
    "n_inner": Key("size", null=True),
    "activation_function": only("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": only(1e-5),
    "scale_attn_weights": only(True),
    "scale_attn_by_inverse_layer_idx": only(False),
    "add_cross_attention": only(False),
    "is_causal": only(True),
    "is_encoder_decoder": only(False),
    "per_layer_config": only(None),
    # Of other heads, of half precision, or not read.
    **without_effect("n_ctx", "pad_token_id", "reorder_and_upcast_attn"),
    **without_effect("summary_type", "summary_activation", "summary_use_proj"),
    **without_effect("summary_proj_to_labels", "summary_first_dropout", "summary_last_dropout"),
}

_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


_FUSED, _FUSED_BIAS = View("d (k h c) -> d k h c"), View("(k h c) -> k h c")
_LAYER = "transformer.h.{n}."
_OURS, _QKV = "blocks.{n}.attention", _LAYER + "attn.c_attn"

ROWS = (
    TensorRow("vocabulary.tokens.embedding", "transformer.wte.weight", MATRIX),
    TensorRow("vocabulary.positions.embedding", "transformer.wpe.weight", MATRIX),
    *norm_rows("vocabulary.norm", "transformer.ln_f"),
    TensorRow("vocabulary.head.kernel", "lm_head.weight", TRANSPOSED),
    *norm_rows("blocks.{n}.attention_norm", _LAYER + "ln_1"),
    *chain.from_iterable(
        layer_rows(f"{_OURS}.{name}", _QKV, View("d (3 e) -> d e", n), View("(3 e) -> e", n))
        for n, name in enumerate(("query", "key", "value"))
    ),
    *layer_rows(f"{_OURS}.qkv", _QKV, _FUSED, _FUSED_BIAS),
    *layer_rows("blocks.{n}.attention.out", _LAYER + "attn.c_proj", MATRIX),
    *norm_rows("blocks.{n}.mlp_norm", _LAYER + "ln_2"),
    *layer_rows("blocks.{n}.mlp.up", _LAYER + "mlp.c_fc", MATRIX),
    *layer_rows("blocks.{n}.mlp.down", _LAYER + "mlp.c_proj", MATRIX),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    if values["n_inner"] not in (None, 4 * values["n_embd"]):
        raise UserError(
            "this GPT2LMHeadModel is not supported",
            why=f"its config.json says n_inner={values['n_inner']}, and model.kind=gpt has MLPs of "
            f"4 · {values['n_embd']} = {4 * values['n_embd']}",
        )
    return {"num_kv_heads": values["n_head"]}


def _config(arguments: Mapping[str, Any], _: HfConfig) -> dict[str, Any]:
    heads = arguments["num_heads"]
    if arguments.get("num_kv_heads") not in (None, heads):
        raise UserError(
            "this model is not a GPT-2",
            why=f"it has {arguments['num_kv_heads']} key/value heads for {heads} query heads",
            fix="a model for export needs as many of both",
        )
    embedded = arguments["embedding_dropout"]
    return {
        "n_ctx": arguments["context_length"],
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": arguments["dropout"] if embedded is None else embedded,
    }


GPT2 = Family(
    kind="gpt",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    rows=ROWS,
    keys=_KEYS,
    aliases=_ALIASES,
    arguments=_arguments,
    config=_config,
    other_architectures=("GPT2Model",),
    # The first published files leave out the prefix.
    spellings=((r"^(?=(h|wte|wpe|ln_f)\.)", "transformer."),),
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    free=("dropout", "embedding_dropout", "attention_dropout"),
)
