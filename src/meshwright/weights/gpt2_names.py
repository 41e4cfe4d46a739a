"""GPT-2: its names and its config.json. Kernels are stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.family import Family, HfConfig, Row
from meshwright.weights.views import MATRIX, TRANSPOSED, VECTOR, View

_DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "resid_pdrop": 0.1,
    "tie_word_embeddings": True,
}


def _columns(part: int) -> View:
    return View("d (3 e) -> d e", part)


def _entries(part: int) -> View:
    return View("(3 e) -> e", part)


_FUSED, _FUSED_BIAS = View("d (k h c) -> d k h c"), View("(k h c) -> k h c")
_LAYER = "transformer.h.{n}."

ROWS = (
    Row("vocabulary.tokens.embedding", "transformer.wte.weight", MATRIX),
    Row("vocabulary.positions.embedding", "transformer.wpe.weight", MATRIX),
    Row("vocabulary.norm.scale", "transformer.ln_f.weight", VECTOR),
    Row("vocabulary.norm.bias", "transformer.ln_f.bias", VECTOR),
    Row("vocabulary.head.kernel", "lm_head.weight", TRANSPOSED),
    Row("blocks.{n}.attention_norm.scale", _LAYER + "ln_1.weight", VECTOR),
    Row("blocks.{n}.attention_norm.bias", _LAYER + "ln_1.bias", VECTOR),
    Row("blocks.{n}.attention.query.kernel", _LAYER + "attn.c_attn.weight", _columns(0)),
    Row("blocks.{n}.attention.key.kernel", _LAYER + "attn.c_attn.weight", _columns(1)),
    Row("blocks.{n}.attention.value.kernel", _LAYER + "attn.c_attn.weight", _columns(2)),
    Row("blocks.{n}.attention.query.bias", _LAYER + "attn.c_attn.bias", _entries(0)),
    Row("blocks.{n}.attention.key.bias", _LAYER + "attn.c_attn.bias", _entries(1)),
    Row("blocks.{n}.attention.value.bias", _LAYER + "attn.c_attn.bias", _entries(2)),
    Row("blocks.{n}.attention.qkv.kernel", _LAYER + "attn.c_attn.weight", _FUSED),
    Row("blocks.{n}.attention.qkv.bias", _LAYER + "attn.c_attn.bias", _FUSED_BIAS),
    Row("blocks.{n}.attention.out.kernel", _LAYER + "attn.c_proj.weight", MATRIX),
    Row("blocks.{n}.attention.out.bias", _LAYER + "attn.c_proj.bias", VECTOR),
    Row("blocks.{n}.mlp_norm.scale", _LAYER + "ln_2.weight", VECTOR),
    Row("blocks.{n}.mlp_norm.bias", _LAYER + "ln_2.bias", VECTOR),
    Row("blocks.{n}.mlp.up.kernel", _LAYER + "mlp.c_fc.weight", MATRIX),
    Row("blocks.{n}.mlp.up.bias", _LAYER + "mlp.c_fc.bias", VECTOR),
    Row("blocks.{n}.mlp.down.kernel", _LAYER + "mlp.c_proj.weight", MATRIX),
    Row("blocks.{n}.mlp.down.bias", _LAYER + "mlp.c_proj.bias", VECTOR),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    if values.get("n_inner") not in (None, 4 * values["n_embd"]):
        raise UserError(
            "this GPT2LMHeadModel cannot be computed",
            why=f"its config.json says n_inner={values['n_inner']}, and model.kind=gpt has MLPs of "
            f"4 · {values['n_embd']} = {4 * values['n_embd']}",
        )
    return {
        "vocab_size": values["vocab_size"],
        "context_length": values["n_positions"],
        "num_blocks": values["n_layer"],
        "hidden_size": values["n_embd"],
        "num_heads": values["n_head"],
        "num_kv_heads": values["n_head"],
        "tied_embeddings": values["tie_word_embeddings"],
        "dropout": values["resid_pdrop"],
    }


def _config(arguments: Mapping[str, Any], _: HfConfig) -> dict[str, Any]:
    heads = arguments["num_heads"]
    if arguments.get("num_kv_heads") not in (None, heads):
        raise UserError(
            "this model is not a GPT-2",
            why=f"it has {arguments['num_kv_heads']} key/value heads for {heads} query heads",
            fix="a model for export needs as many of both",
        )
    dropout = arguments["dropout"]
    return {
        "vocab_size": arguments["vocab_size"],
        "n_positions": arguments["context_length"],
        "n_ctx": arguments["context_length"],
        "n_layer": arguments["num_blocks"],
        "n_embd": arguments["hidden_size"],
        "n_head": heads,
        "n_inner": None,
        "tie_word_embeddings": arguments["tied_embeddings"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), dropout),
        # The model has no dropout on attention weights.
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    kind="gpt",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    rows=ROWS,
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    computes={
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
