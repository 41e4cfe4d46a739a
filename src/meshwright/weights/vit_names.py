"""ViT: its names and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.weights.config_values import check_value
from meshwright.weights.family import Family, HfConfig, Row
from meshwright.weights.views import TRANSPOSED, VECTOR, View

_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
}

_SIDES = {"image_size": 224, "patch_size": 16}
"""Sizes that may be given for both sides, as a list."""

_HEADS = View("(h c) d -> d h c")
_HEAD_BIAS = View("(h c) -> h c")
_LAYER = "vit.encoder.layer.{n}."

ROWS = (
    Row("class_token", "vit.embeddings.cls_token", View("1 n d -> n d")),
    Row("positions", "vit.embeddings.position_embeddings", View("1 n d -> n d")),
    Row(
        "embed.kernel",
        "vit.embeddings.patch_embeddings.projection.weight",
        View("d c y x -> (y x c) d"),
    ),
    Row("embed.bias", "vit.embeddings.patch_embeddings.projection.bias", VECTOR),
    Row("norm.scale", "vit.layernorm.weight", VECTOR),
    Row("norm.bias", "vit.layernorm.bias", VECTOR),
    Row("head.kernel", "classifier.weight", TRANSPOSED),
    Row("head.bias", "classifier.bias", VECTOR),
    Row("blocks.{n}.attention_norm.scale", _LAYER + "layernorm_before.weight", VECTOR),
    Row("blocks.{n}.attention_norm.bias", _LAYER + "layernorm_before.bias", VECTOR),
    Row("blocks.{n}.attention.query.kernel", _LAYER + "attention.attention.query.weight", _HEADS),
    Row("blocks.{n}.attention.query.bias", _LAYER + "attention.attention.query.bias", _HEAD_BIAS),
    Row("blocks.{n}.attention.key.kernel", _LAYER + "attention.attention.key.weight", _HEADS),
    Row("blocks.{n}.attention.key.bias", _LAYER + "attention.attention.key.bias", _HEAD_BIAS),
    Row("blocks.{n}.attention.value.kernel", _LAYER + "attention.attention.value.weight", _HEADS),
    Row("blocks.{n}.attention.value.bias", _LAYER + "attention.attention.value.bias", _HEAD_BIAS),
    Row(
        "blocks.{n}.attention.out.kernel",
        _LAYER + "attention.output.dense.weight",
        View("d (h c) -> h c d"),
    ),
    Row("blocks.{n}.attention.out.bias", _LAYER + "attention.output.dense.bias", VECTOR),
    Row("blocks.{n}.mlp_norm.scale", _LAYER + "layernorm_after.weight", VECTOR),
    Row("blocks.{n}.mlp_norm.bias", _LAYER + "layernorm_after.bias", VECTOR),
    Row("blocks.{n}.up.kernel", _LAYER + "intermediate.dense.weight", TRANSPOSED),
    Row("blocks.{n}.up.bias", _LAYER + "intermediate.dense.bias", VECTOR),
    Row("blocks.{n}.down.kernel", _LAYER + "output.dense.weight", TRANSPOSED),
    Row("blocks.{n}.down.bias", _LAYER + "output.dense.bias", VECTOR),
)


def _arguments(values: HfConfig) -> dict[str, Any]:
    return {
        "image_size": _side(values, "image_size"),
        "patch_size": _side(values, "patch_size"),
        "channels_in": values["num_channels"],
        "num_blocks": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "num_heads": values["num_attention_heads"],
        "mlp_size": values["intermediate_size"],
        "num_classes": len(values.get("id2label") or range(values.get("num_labels", 2))),
        "class_token": True,
        "norm_epsilon": values["layer_norm_eps"],
        "exact_gelu": values["hidden_act"] == "gelu",
        "dropout": values["hidden_dropout_prob"],
    }


def _side(values: Mapping[str, Any], key: str) -> int:
    side = values.get(key, _SIDES[key])
    sides: list[Any] = side if isinstance(side, list) and side else [side]
    for each in sides:
        check_value(key, each, _SIDES[key])
    if len(set(sides)) > 1:
        raise UserError(
            "this ViTForImageClassification cannot be computed",
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
        "num_channels": arguments["channels_in"],
        "num_hidden_layers": arguments["num_blocks"],
        "hidden_size": width,
        "num_attention_heads": arguments["num_heads"],
        "intermediate_size": 4 * width if mlp is None else mlp,
        "hidden_act": "gelu" if arguments["exact_gelu"] else "gelu_pytorch_tanh",
        "layer_norm_eps": arguments["norm_epsilon"],
        "hidden_dropout_prob": arguments["dropout"],
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": True,
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }


def _sizes(arguments: Mapping[str, Any]) -> dict[str, int]:
    return dict.fromkeys(("y", "x"), arguments["patch_size"])


VIT = Family(
    kind="vit",
    architecture="ViTForImageClassification",
    model_type="vit",
    rows=ROWS,
    defaults=_DEFAULTS,
    arguments=_arguments,
    config=_config,
    computes={
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "qkv_bias": (True,),
    },
    optional={"id2label": {"0": "LABEL_0"}, "num_labels": 2},
    ignored=(r"vit\.pooler\..*",),
    free=("dropout",),
    sizes=_sizes,
)
