"""The models and batches that are compared on GPUs, as every side spells them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_TOKENS, NUM_IMAGES = 60_000_000, 16_384


@dataclass(frozen=True)
class Rows:
    """Rows of random tokens, cut from one memory-mapped file.

    Attributes:
        length: tokens of a row.
        vocab_size: size of the vocabulary.
    """

    length: int
    vocab_size: int
    unit = "tokens"

    @property
    def units(self) -> int:
        """Tokens of a row."""
        return self.length

    def write(self, folder: Path) -> Path:
        """Write the data of all sides, and return their path."""
        drawn = np.random.default_rng(0).integers(0, min(self.vocab_size, 50_000), NUM_TOKENS)
        np.save(folder / "tokens.npy", drawn.astype(np.uint32))
        return folder / "tokens.npy"

    def settings(self, path: Path) -> list[str]:
        """Return how `meshwright train` reads them."""
        return ["data=tokens", f"data.path={path}", f"data.sequence_length={self.length}"]


@dataclass(frozen=True)
class Images:
    """Random images as bytes, [N, size, size, channels], in memory-mapped arrays.

    A batch of 256 color images is 38 MB, which is read ahead in a few milliseconds. The pixels are
    0 to 3: of the magnitude of normalized images, so that no side has to scale them.

    Attributes:
        size: height and width.
        channels: of a pixel.
        classes: labels are below it.
    """

    size: int
    channels: int
    classes: int
    unit = "images"
    units = 1

    def write(self, folder: Path) -> Path:
        """Write the data of all sides, and return their path."""
        random = np.random.default_rng(0)
        shape = (NUM_IMAGES, self.size, self.size, self.channels)
        np.save(folder / "image.npy", random.integers(0, 4, shape, np.uint8))
        np.save(folder / "label.npy", random.integers(0, self.classes, NUM_IMAGES, np.int32))
        return folder

    def settings(self, path: Path) -> list[str]:
        """Return how `meshwright train` reads them."""
        shape = f"[{self.size},{self.size},{self.channels}]"
        return ["data=arrays", f"data.path={path}", f"task.input_shape={shape}"]


@dataclass(frozen=True)
class Case:
    """One model and batch.

    Attributes:
        rows: samples of a step.
        data: what a sample is.
        overrides: the model for `meshwright train`.
        peer: name of the transformers config class, and its arguments; None without a peer.
        attention: the attention's size in FLOPs: blocks times width.
        flops: FLOPs of a sample; 0 to count them as those of a decoder.
        asked: how many times the peer's speed is asked for.
        peer_attention: the peer's implementation of attention.
    """

    rows: int
    data: Rows | Images
    overrides: tuple[str, ...]
    peer: tuple[str, dict[str, Any]] | None
    attention: int = 0
    flops: float = 0.0
    asked: float = 1.15
    peer_attention: str = "sdpa"

    def batch(self) -> str:
        """Return the size of a batch, such as 32×1024."""
        size = self.data.size if isinstance(self.data, Images) else 0
        return f"{self.rows}×{size}×{size}" if size else f"{self.rows}×{self.data.units}"

    def step_flops(self, parameters: int) -> float:
        """Return the FLOPs of a step: 6 for each parameter and token, and attention."""
        length = self.data.units
        decoder = length * (6 * parameters + 12 * self.attention * length / 2)
        return self.rows * (self.flops or decoder)


def gpt2(
    name: str, blocks: int, width: int, heads: int, *, rows: int, length: int = 1024,
    dropout: float = 0.0, asked: float = 1.15,
) -> Case:  # fmt: skip
    """Return GPT-2 of some size, with a vocabulary that is a multiple of 128."""
    sizes = {"vocab_size": 50304, "n_positions": length, "n_layer": blocks, "n_embd": width}
    # Our model drops nothing inside of attention.
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop"), dropout) | {"attn_pdrop": 0.0}
    own = (f"model={name}", "model.vocab_size=50304", f"model.dropout={dropout}")
    peer = ("GPT2Config", sizes | {"n_head": heads, "use_cache": False} | rates)
    return Case(rows, Rows(length, 50304), own, peer, blocks * width, asked=asked)


def own(name: str, loss: str, blocks: int, width: int, heads: int, *, rows: int, length: int = 1024
        ) -> Case:  # fmt: skip
    """Return a decoder of user_models.py, of the size of a GPT-2."""
    sizes = {"vocab_size": 50304, "context_length": length, "num_blocks": blocks}
    sizes |= {"hidden_size": width, "num_heads": heads}
    settings = [f"model.kind=user_models:{name}", f"task.kind=user_models:{loss}"]
    settings += [f"model.{key}={value}" for key, value in sizes.items()]
    return Case(rows, Rows(length, 50304), tuple(settings), None, blocks * width)


def vit_flops(blocks: int, width: int, patches: int, patch: int) -> float:
    """Return the FLOPs of a training step of a vision transformer, for one image."""
    products = 12 * blocks * width**2 + patch * width
    return 6 * patches * products + 12 * blocks * width * patches**2


GEMMA_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "use_cache": False,
}
GEMMA_2 = {"num_hidden_layers": 8, "use_cache": False}
"""Eight of the 26 blocks of Gemma 2 2B, all else as in its default config: two trainings of 13 do
not fit on a card at once."""
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_cache": False,
}
VIT_NANO = {
    "image_size": 28,
    "patch_size": 7,
    "num_channels": 1,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_labels": 10,
}
RESNET_NANO = {
    "embedding_size": 8,
    "hidden_sizes": [32, 64, 128, 256],
    "depths": [1, 1, 1, 1],
    "num_labels": 10,
}
RESNET_FLOPS = 3 * 2 * 4.09e9
"""ResNet-50 has 4.09 billion multiplications forward at 224 × 224."""
CASES = {
    "gpt2_nano": gpt2("gpt2_nano", 2, 64, 4, rows=4, length=64),
    "gpt2": gpt2("gpt2", 12, 768, 12, rows=32),
    "gpt2_dropout": gpt2("gpt2", 12, 768, 12, rows=32, dropout=0.1),
    "gpt2_medium": gpt2("gpt2_medium", 24, 1024, 16, rows=16, asked=1.25),
    "gemma3_1b": Case(
        4, Rows(2048, 262144), ("model=gemma3_1b",), ("Gemma3TextConfig", GEMMA_1B), 26 * 1024,
        asked=1.35,
    ),
    "llama3_1b": Case(
        4, Rows(2048, 128256), ("model=llama3_1b",), ("LlamaConfig", LLAMA_1B), 16 * 2048,
        asked=1.4,
    ),
    "gemma2_2b": Case(
        4, Rows(2048, 256000), ("model=gemma2_2b", "model.num_blocks=8"),
        ("Gemma2Config", GEMMA_2), 8 * 2048, asked=1.2, peer_attention="flex_attention",
    ),
    "gemma3_nano": Case(4, Rows(64, 1024), ("model=gemma3_tiny",), None, 4 * 256),
    "gemma3_4b": Case(4, Rows(2048, 262208), ("model=gemma3_4b",), None, 34 * 2048),
    "llama3_8b": Case(4, Rows(2048, 128256), ("model=llama3_8b",), None, 32 * 4096),
    "vit_nano": Case(
        8, Images(28, 1, 10),
        ("model=vit_tiny", "model.dropout=0.0", "model.class_token=true"), ("ViTConfig", VIT_NANO),
        flops=vit_flops(2, 64, 17, 49), asked=1.0,
    ),
    "vit_b": Case(
        256, Images(224, 3, 1000), ("model=vit_b",), ("ViTConfig", {"num_labels": 1000}),
        flops=vit_flops(12, 768, 197, 768), asked=1.3,
    ),
    "resnet_nano": Case(
        8, Images(32, 3, 10),
        ("model=resnet50", "model.depths=[1,1,1,1]", "model.width=8", "model.num_classes=10"),
        ("ResNetConfig", RESNET_NANO), flops=1e6, asked=1.0,
    ),
    "resnet50": Case(
        256, Images(224, 3, 1000), ("model=resnet50",), ("ResNetConfig", {"num_labels": 1000}),
        flops=RESNET_FLOPS, asked=1.15,
    ),
    "user_mha_nano": own("Mha", "optax_loss", 2, 64, 4, rows=4, length=64),
    "user_hand_nano": own("Hand", "hand_loss", 2, 64, 4, rows=4, length=64),
    "user_mha": own("Mha", "optax_loss", 12, 768, 12, rows=32),
    "user_hand": own("Hand", "hand_loss", 12, 768, 12, rows=32),
}  # fmt: skip
