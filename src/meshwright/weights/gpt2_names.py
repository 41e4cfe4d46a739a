"""GPT-2: its names and its config.json. Kernels are stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.family import Family, HfConfig, TensorRow, layer_rows, norm_rows
from meshwright.weights.views import MATRIX, TRANSPOSED, View

_DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "resid_pdrop": 0.1,
    "tie_word_embeddings": True,
}

_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "num_blocks": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "tied_embeddings": "tie_word_embeddings",
    "dropout": "resid_pdrop",
}


def _columns(part: int) -> View:
    return View("d (3 e) -> d e", part)


def _entries(part: int) -> View:
    return View("(3 e) -> e", part)


_FUSED, _FUSED_BIAS = View("d (k h c) -> d k h c"), View("(k h c) -> k h c")
_LAYER = "transformer.h.{n}."

ROWS = (
    TensorRow("vocabulary.tokens.embedding", "transformer.wte.weight", MATRIX),
    TensorRow("vocabulary.positions.embedding", "transformer.wpe.weight", MATRIX),
    *norm_rows("vocabulary.norm", "transformer.ln_f"),
    TensorRow("vocabulary.head.kernel", "lm_head.weight", TRANSPOSED),
    *norm_rows("blocks.{n}.attention_norm", _LAYER + "ln_1"),
    *layer_rows("blocks.{n}.attention.query", _LAYER + "attn.c_attn", _columns(0), _entries(0)),
    *layer_rows("blocks.{n}.attention.key", _LAYER + "attn.c_attn", _columns(1), _entries(1)),
    *layer_rows("blocks.{n}.attention.value", _LAYER + "attn.c_attn", _columns(2), _entries(2)),
    *layer_rows("blocks.{n}.attention.qkv", _LAYER + "attn.c_attn", _FUSED, _FUSED_BIAS),
    *layer_rows("blocks.{n}.attention.out", _LAYER + "attn.c_proj", MATRIX),
    *norm_rows("blocks.{n}.mlp_norm", _LAYER + "ln_2"),
    *layer_rows("blocks.{n}.mlp.up", _LAYER + "mlp.c_fc", MATRIX),
    *layer_rows("blocks.{n}.mlp.down", _LAYER + "mlp.c_proj", MATRIX),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    if values.get("n_inner") not in (None, 4 * values["n_embd"]):
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
    return {
        "n_ctx": arguments["context_length"],
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": arguments["dropout"],
        # The model has no dropout on attention weights.
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    kind="gpt",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    rows=ROWS,
    defaults=_DEFAULTS,
    keys=_KEYS,
    arguments=_arguments,
    config=_config,
    supported={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    optional={"n_inner": 3072},
    other_architectures=("GPT2Model",),
    # The first published files leave out the prefix.
    spellings=((r"^(?=(h|wte|wpe|ln_f)\.)", "transformer."),),
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    free=("dropout",),
)
