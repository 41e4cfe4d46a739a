"""Plain Flax NNX models by kind; the module of a model loads on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax import nnx

_BUILDERS = {
    "gpt": ("gpt", "GPT"),
    "gemma2": ("gemma3", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "llama3": ("llama3", "Llama3"),
    "mistral": ("llama3", "Mistral"),
    "phi3": ("llama3", "Phi3"),
    "qwen2": ("llama3", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "stacked_gpt": ("stacked", "StackedGPT"),
    "moe": ("moe", "MoEGPT"),
    "lstm": ("lstm", "LSTM"),
    "mlp": ("mlp", "MLP"),
    "linen_mlp": ("linen_mlp", "linen_mlp"),
    "conv": ("conv", "ConvNet"),
    "resnet": ("resnet", "ResNet"),
    "vit": ("vit", "ViT"),
    "vae": ("vae", "VAE"),
}

MODEL_KINDS: tuple[str, ...] = tuple(_BUILDERS)
"""The kinds `find_builder` knows."""


def find_builder(kind: str) -> Callable[..., nnx.Module]:
    """Return the builder of this kind, which takes sizes and ``rngs`` as keyword arguments."""
    if kind not in _BUILDERS:
        raise ValueError(f"There is no model kind {kind!r}; the kinds are {', '.join(_BUILDERS)}.")
    module, name = _BUILDERS[kind]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def build_model(kind: str, *, rngs: nnx.Rngs, **sizes: Any) -> nnx.Module:
    """Build a model of this kind; other sizes have their defaults."""
    return find_builder(kind)(rngs=rngs, **sizes)
