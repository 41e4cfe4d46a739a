"""Models of Hugging Face folders compute what transformers computes."""

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import FOLDERS, HF, copy_folder, expected, saved_tensors
from quick import quick_options

import meshwright as mw
from meshwright.weights.safetensors_format import write_file

TOLERANCE = 1e-5
"""Of the largest logit, in float32."""


def assert_same_logits(model, name):
    inputs, logits = expected(name)
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x), compiler_options=quick_options())
    ours = np.asarray(call(state, inputs))
    assert np.abs(ours - logits).max() <= TOLERANCE * np.abs(logits).max()


EVERYDAY = ("gpt2", "llama", "gemma3")


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in FOLDERS]
)
def test_logits_equal_those_of_transformers(name):
    assert_same_logits(mw.load_model(HF / name), name)


def test_both_spellings_of_multimodal_names_are_read(tmp_path):
    folder = copy_folder("gemma3_multimodal", tmp_path / "other")
    tensors = saved_tensors(folder)
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "vision_tower.", "model.vision_tower."
        ): array
        for name, array in tensors.items()
    }
    # Tied, and present nevertheless.
    renamed["lm_head.weight"] = renamed["model.language_model.embed_tokens.weight"]
    shapes = {name: array.shape for name, array in renamed.items()}
    write_file(folder / "model.safetensors", shapes, "bfloat16", iter(renamed.values()))
    assert_same_logits(mw.load_model(folder), "gemma3_multimodal")


def test_the_first_published_spelling_of_gpt2_is_read(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "other")
    tensors = saved_tensors(folder)
    renamed = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    renamed["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    shapes = {name: array.shape for name, array in renamed.items()}
    write_file(folder / "model.safetensors", shapes, "float32", iter(renamed.values()))
    assert_same_logits(mw.load_model(folder), "gpt2")


def test_a_fused_kernel_is_the_same_model():
    fused = mw.load_model(HF / "gpt2", model=mw.hf_model(HF / "gpt2", qkv="fused"))
    assert fused.blocks[0].attention.qkv.kernel.shape == (16, 3, 4, 4)
    assert_same_logits(fused, "gpt2")
