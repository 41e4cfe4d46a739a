"""ViT: its names and its config.json."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import Key, WrongValue, check_value, only, without_effect
from meshwright.weights.family import Family, HfConfig, TensorRow, layer_rows, norm_rows
from meshwright.weights.views import View

_SIDES = {"image_size": 224, "patch_size": 16}
"""Sizes that may be given for both sides, as a list."""

_KEYS = {
    "hidden_size": Key("size", 768, "hidden_size"),
    "num_hidden_layers": Key("size", 12, "num_blocks"),
    "num_attention_heads": Key("size", 12, "num_heads"),
    "intermediate_size": Key("size", 3072, "mlp_size"),
    "num_channels": Key("size", 3, "channels_in"),
    "layer_norm_eps": Key("small", 1e-12, "norm_epsilon"),
    "hidden_dropout_prob": Key("rate", 0.0, "dropout"),
    "attention_probs_dropout_prob": Key("rate", 0.0, "attention_dropout"),
    "hidden_act": only("gelu", "gelu_new", "gelu_pytorch_tanh"),
    "qkv_bias": only(True),
    "id2label": Key("object", null=True),
    "num_labels": Key("size"),
    "is_encoder_decoder": only(False),
    "per_layer_config": only(None),
    **{key: Key("", side) for key, side in _SIDES.items()},
    # Of other heads.
    **without_effect("encoder_stride", "pooler_output_size", "pooler_act"),
}

_HEADS = View("(h c) d -> d h c"), View("(h c) -> h c")
_PATCHES = View("d c y x -> (y x c) d")
_LAYER = "vit.encoder.layer.{n}."
_ATTENTION = _LAYER + "attention."

ROWS = (
    TensorRow("class_token", "vit.embeddings.cls_token", View("1 n d -> n d")),
    TensorRow("positions", "vit.embeddings.position_embeddings", View("1 n d -> n d")),
    *layer_rows("embed", "vit.embeddings.patch_embeddings.projection", _PATCHES),
    *norm_rows("norm", "vit.layernorm"),
    *layer_rows("head", "classifier"),
    *norm_rows("blocks.{n}.attention_norm", _LAYER + "layernorm_before"),
    *layer_rows("blocks.{n}.attention.query", _ATTENTION + "attention.query", *_HEADS),
    *layer_rows("blocks.{n}.attention.key", _ATTENTION + "attention.key", *_HEADS),
    *layer_rows("blocks.{n}.attention.value", _ATTENTION + "attention.value", *_HEADS),
    *layer_rows("blocks.{n}.attention.out", _ATTENTION + "output.dense", View("d (h c) -> h c d")),
    *norm_rows("blocks.{n}.mlp_norm", _LAYER + "layernorm_after"),
    *layer_rows("blocks.{n}.up", _LAYER + "intermediate.dense"),
    *layer_rows("blocks.{n}.down", _LAYER + "output.dense"),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    labels = values["id2label"]
    if labels is not None and not labels:
        raise WrongValue("id2label", labels, "an object with a key for each class")
    return {
        "image_size": _side(values, "image_size"),
        "patch_size": _side(values, "patch_size"),
        # As in transformers, a number counts more than names.
        "num_classes": values["num_labels"] or len(labels or range(2)),
        "embedding_dropout": values["hidden_dropout_prob"],
        "class_token": True,
        "exact_gelu": values["hidden_act"] == "gelu",
    }


def _side(values: Mapping[str, Any], key: str) -> int:
    side = values[key]
    sides: list[Any] = side if isinstance(side, list) and side else [side]
    for each in sides:
        check_value(key, each, "size")
    if len(set(sides)) > 1:
        raise UserError(
            "this ViTForImageClassification is not supported",
            why=f"its config.json says {key}={sides}, and model.kind=vit has square ones",
        )
    return sides[0]


def _config(arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
    if not arguments["class_token"]:
        raise UserError(
            "this model is not a published ViT",
            why="it has no class token",
            fix="train with model.class_token=true for an export",
        )
    width, mlp = arguments["hidden_size"], arguments.get("mlp_size")
    labels = kept.get("id2label") or {}
    if len(labels) != arguments["num_classes"]:
        labels = {str(n): f"LABEL_{n}" for n in range(arguments["num_classes"])}
    return {
        "image_size": arguments["image_size"],
        "patch_size": arguments["patch_size"],
        "intermediate_size": 4 * width if mlp is None else mlp,
        "hidden_act": "gelu" if arguments["exact_gelu"] else "gelu_pytorch_tanh",
        "qkv_bias": True,
        "id2label": labels,
        **({"num_labels": len(labels)} if "num_labels" in kept else {}),
        "label2id": {label: int(number) for number, label in labels.items()},
    }


VIT = Family(
    kind="vit",
    architecture="ViTForImageClassification",
    model_type="vit",
    rows=ROWS,
    keys=_KEYS,
    arguments=_arguments,
    config=_config,
    ignored=(r"vit\.pooler\..*",),
    free=("dropout", "embedding_dropout", "attention_dropout"),
    sizes=lambda arguments: dict.fromkeys(("y", "x"), arguments["patch_size"]),
)
