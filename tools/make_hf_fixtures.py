"""Write the folders of tests/fixtures/hf: tiny models of transformers with their own logits.

Needs packages that the project does not: ``pip install torch transformers`` in another environment,
then ``python tools/make_hf_fixtures.py tests/fixtures/hf``, with names for some folders only. The
weights are random, so no file of anybody's model is in the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import ByteLevelBPETokenizer

SEED = 0
LENGTH = 24
"""Tokens of a row: longer than the sliding windows."""

DECODER = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

TEXT = "the cat sat on the mat and the dog sat on the log while the rat ate the hat " * 8


def main(target: Path, *names: str) -> None:
    """Write every folder, or those with these names."""
    families = (gpt2, gemma2, gemma3, gemma3_multimodal, llama, mistral, phi3, qwen2, qwen3, vit)
    for make in families:
        if not names or make.__name__ in names:
            make(target / make.__name__)


def gpt2(folder: Path) -> None:
    """Tied embeddings, one file, a tokenizer and a generation config."""
    config = hf.GPT2Config(
        vocab_size=320,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    save(hf.GPT2LMHeadModel(config), folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def gemma2(folder: Path) -> None:
    """With bounds that scores and logits reach; only eager attention computes the first."""
    config = hf.Gemma2Config(
        **DECODER,
        sliding_window=4,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    )
    save(hf.Gemma2ForCausalLM(config), folder)


def gemma3(folder: Path) -> None:
    """The text model: sliding windows of 4 tokens, every second block global."""
    save(hf.Gemma3ForCausalLM(gemma3_config(query_pre_attn_scalar=8)), folder)


def gemma3_multimodal(folder: Path) -> None:
    """With a vision model, in bfloat16, its positions scaled as in the sizes from 4B on."""
    text = gemma3_config(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        }
    )
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = hf.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=95,
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    save(model, folder, torch.bfloat16)
    # As published: values that equal the defaults are left out, and rotary positions are spelled
    # as transformers 4 does.
    values = json.loads((folder / "config.json").read_text())
    inner = values["text_config"]
    kept = (*DECODER, "sliding_window", "model_type")
    values["text_config"] = {
        **{key: inner[key] for key in kept},
        "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2))


def gemma3_config(**changes: Any) -> Any:
    """Return the config of a tiny text model."""
    layers = [("full" if n % 2 else "sliding") + "_attention" for n in range(4)]
    values = {**DECODER, "num_hidden_layers": 4, "sliding_window": 4, "layer_types": layers}
    return hf.Gemma3TextConfig(**values, **changes)


def llama(folder: Path) -> None:
    """Untied, with scaled rotary positions, in several files with an index."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    save(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_parameters=rope)), folder, shard="12KB")


def mistral(folder: Path) -> None:
    """Every block sees a window of 4 tokens; in bfloat16."""
    config = hf.MistralConfig(**DECODER, sliding_window=4)
    save(hf.MistralForCausalLM(config), folder, torch.bfloat16)


def phi3(folder: Path) -> None:
    """Queries, keys and values in one tensor, gate and up in another; a window."""
    values = {key: value for key, value in DECODER.items() if key != "head_dim"}
    config = hf.Phi3Config(**values, sliding_window=5, pad_token_id=0, eos_token_id=1)
    save(hf.Phi3ForCausalLM(config), folder)


def qwen2(folder: Path) -> None:
    """Biases of queries, keys and values; tied embeddings."""
    config = hf.Qwen2Config(**DECODER, tie_word_embeddings=True)
    save(hf.Qwen2ForCausalLM(config), folder)


def qwen3(folder: Path) -> None:
    """Tied embeddings, in float16."""
    config = hf.Qwen3Config(**DECODER, tie_word_embeddings=True)
    save(hf.Qwen3ForCausalLM(config), folder, torch.float16)


def vit(folder: Path) -> None:
    """With a class token and five classes."""
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    save(hf.ViTForImageClassification(config), folder)


def save(model: Any, folder: Path, dtype: Any = torch.float32, shard: str = "1GB") -> None:
    """Give a model random weights, and save it with inputs and its logits in float32."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_norm = "norm" in name or "ln_" in name
            scale_at_one = (
                is_norm and name.endswith("weight") and "Gemma" not in type(model).__name__
            )
            parameter.copy_(noise * 0.1 + 1 if scale_at_one else noise * (0.1 if is_norm else 0.25))
    model.eval().to(dtype).save_pretrained(folder, max_shard_size=shard)
    # Read again, because a conversion would also have rounded tables that are not in the files.
    # Of the ways to compute attention, the usual one leaves out the bounds of Gemma 2.
    attention = "eager" if folder.name == "gemma2" else None
    model = (
        type(model)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        .eval()
    )
    inputs = make_inputs(model)
    with torch.no_grad():
        logits = model(**inputs).logits
    np.savez(folder / "expected.npz", logits=logits, **inputs)


def make_inputs(model: Any) -> dict[str, Any]:
    """Return random inputs of a model."""
    config = model.config.get_text_config()
    if hasattr(config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
    # The last token of the multimodal vocabulary stands for an image.
    return {"input_ids": torch.randint(0, config.vocab_size - 1, (2, LENGTH))}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
