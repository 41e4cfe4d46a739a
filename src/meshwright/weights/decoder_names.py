"""What the families of decoders share: names, and values of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import Setting, UserError
from meshwright.weights.config_values import ROTARY, Key, WrongValue, only
from meshwright.weights.family import Family, HfConfig, TensorRow
from meshwright.weights.hf_folder import CONFIG
from meshwright.weights.views import MATRIX, TRANSPOSED, VECTOR

_LAYER = "model.layers.{n}."
ATTENTION = f"{_LAYER}self_attn."

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
    "vocab_size": ("size", "vocab_size"),
    "max_position_embeddings": ("size", "context_length"),
    "num_hidden_layers": ("size", "num_blocks"),
    "hidden_size": ("size", "hidden_size"),
    "num_attention_heads": ("size", "num_heads"),
    "num_key_value_heads": ("size", "num_kv_heads"),
    "head_dim": ("size", "head_dim"),
    "intermediate_size": ("size", "mlp_size"),
    "rms_norm_eps": ("small", "norm_epsilon"),
    "tie_word_embeddings": ("flag", "tied_embeddings"),
}
"""Rules and arguments of the keys that all of them have."""

_COMMON = {
    **ROTARY,
    "attention_dropout": Key("rate", 0.0, "attention_dropout"),
    "attention_bias": only(False),
    "is_causal": only(True),
    "is_encoder_decoder": only(False),
    "per_layer_config": only(None),
}


def decoder_family(
    *,
    rows: tuple[TensorRow, ...],
    defaults: Mapping[str, Any],
    keys: Mapping[str, Key],
    arguments: Callable[[HfConfig], dict[str, Any]],
    config: Callable[[Mapping[str, Any]], dict[str, Any]],
    pad_token: int | None = None,
    spellings: tuple[tuple[str, str], ...] = (),
    unpublished: Mapping[str, tuple[Any, ...]] | None = None,
    **own: Any,
) -> Family:
    """Return a family of decoders: what they share, completed by what is its own.

    Its rows replace shared ones of the same path. ``defaults`` are values of shared keys that
    config.json may leave out; None may be null, too. ``unpublished`` are arguments that config.json
    has no key for, and values that they may have. ``own`` are other fields of `Family`.
    """

    def whole_config(model: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
        for name, known in (unpublished or {}).items():
            refuse_unpublished(own["architecture"], model, name, *known)
        # Training on shorter rows does not shorten what the model can read.
        key = "max_position_embeddings"
        pad = kept.get("pad_token_id") if model["pad_token_id"] is None else model["pad_token_id"]
        length = max(model["context_length"], kept.get(key) or 0)
        return {key: length, "pad_token_id": pad} | config(model)

    def all_arguments(values: HfConfig) -> dict[str, Any]:
        heads, size = values["num_attention_heads"], values["hidden_size"]
        return {
            "num_kv_heads": values["num_key_value_heads"] or heads,
            "head_dim": values["head_dim"] or size // heads,
            "pad_token_id": _row(values["pad_token_id"], values["vocab_size"]),
        } | arguments(values)

    shared = {
        key: Key(rule, defaults[key], argument, null=defaults[key] is None)
        for key, (rule, argument) in _KEYS.items()
    }
    pad_key = Key("token", pad_token, "pad_token_id", null=True)
    return Family(
        rows=(*rows, *_ROWS),
        keys={**shared, **_COMMON, "pad_token_id": pad_key, **keys},
        arguments=all_arguments,
        config=whole_config,
        spellings=(*spellings, *_SPELLINGS),
        ignored=(r".*\.rotary_emb\.inv_freq",),
        free=("context_length", "attention_dropout"),
        **own,
    )


def refuse_unpublished(
    architecture: str, arguments: Mapping[str, Any], name: str, *known: Any
) -> None:
    """Refuse an argument of the model that an architecture has no key for, unless it is None."""
    value = arguments.get(name)
    if value not in (None, *known):
        raise UserError(
            f"the model is not a {architecture}",
            why=f"it has {Setting(f'model.{name}', value)}, for which there is no key in {CONFIG}",
            fix="train a model without it, or one of another model.kind",
        )


def refuse_uneven_heads(values: HfConfig) -> None:
    """Refuse a width that the heads do not divide, as transformers does even with a head_dim."""
    heads, size = values["num_attention_heads"], values["hidden_size"]
    if size % heads:
        raise WrongValue("num_attention_heads", heads, f"a divisor of hidden_size={size}")


def check_layer_types(values: HfConfig, *known: str) -> list[str] | None:
    """Return the kinds of the layers, if they are given: one for each, all of them known."""
    types, count = values["layer_types"], values["num_hidden_layers"]
    if types is not None and (len(types) != count or not all(each in known for each in types)):
        raise WrongValue("layer_types", types, f"a list of {count}, each {' or '.join(known)}")
    return types


def _row(token: int | None, vocab_size: int) -> int | None:
    """Return the row of a token; a negative one counts from the end, as in PyTorch."""
    if token is not None and not -vocab_size <= token < vocab_size:
        raise WrongValue("pad_token_id", token, f"in a vocabulary of {vocab_size}")
    return token if token is None else token % vocab_size
