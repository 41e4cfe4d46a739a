"""Write tests/fixtures/hf_cases: what transformers makes of odd config.json files and odd folders.

Needs packages that the project does not: ``pip install torch transformers`` in another environment,
then ``python tools/make_hf_cases.py tests/fixtures``, with names to try only some families anew.
The folders of tests/fixtures/hf are changed in one place at a time, and loaded:

- every key that a config class has, or that its code reads, gets every value of a list;
- a few folders get several changes, or other files; ``odd.json`` lists them. In its configs, null
  leaves a key out, and ``tensors`` and ``stale`` name a function of `CHANGES`.

``cases.json`` has the values of each key and, for each class and value, one letter: ``f`` if
loading fails or leaves weights random, ``s`` if the logits stay the same, ``d`` if they differ.
``logits.npz`` has some of the logits that differ. `tests/weights/test_transformers_cases.py`
compares. ``greedy.json`` has the likeliest continuations of prompts, which
`tests/generation/test_transformers.py` compares.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import (
    configuration_utils,
    masking_utils,
    modeling_rope_utils,
    modeling_utils,
)

hf.logging.set_verbosity(50)
hf.logging.disable_progress_bar()
torch.set_num_threads(1)

SAMPLED = 40
"""How many logits of a case are kept."""

LARGEST = 10**7
"""Parameters of a model that is tried; defaults of config classes have billions."""

VALUES = (None, False, True, 0, 1, 3, 0.5, "x", [], {})
"""What every key is set to in turn."""

GREEDY = {"gpt2": 28, "llama": 64, "gemma3": 64, "qwen3": 64}
"""New tokens of each model; GPT-2's table of positions has 32 rows."""

PROMPTS = [[5, 17, 42], [90, 3, 3, 60]]

LAYERS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 20_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
}

MORE: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral", "granite", "gemma3_text", "gemma3", "qwen2", "vit", "gpt2"),
    "architectures": (["LlamaModel"], ["MistralForCausalLM"], ["GPT2Model"]),
    "hidden_act": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python", "relu", "swish"),
    "hidden_activation": ("gelu_new", "gelu_pytorch_tanh", "gelu_python", "relu"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_python", "gelu_fast", "relu"),
    "layer_types": (LAYERS[:1], LAYERS[:1] * 3, LAYERS[:1] * 4, LAYERS, LAYERS[1:2] * 4),
    "rope_theta": (20_000, 20_000.0),
    "rope_local_base_freq": (500.0,),
    "rms_norm_eps": (1, 1e-2),
    "layer_norm_epsilon": (1, 1e-2),
    "layer_norm_eps": (1, 1e-2),
    "query_pre_attn_scalar": (32, 32.0),
    "rope_parameters": (
        ROPE,
        {**ROPE, "original_max_position_embeddings": 8},
        {**ROPE, "rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "factor": 2.0},
        {"rope_theta": 30_000.0},
        {"rope_theta": None},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_theta": 30_000.0}},
        {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        {"full_attention": None, "sliding_attention": {"rope_theta": 300.0}},
        {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 30_000.0, "sliding_attention": {"rope_theta": 300.0}},
    ),
    "id2label": ({"0": "a"}, {str(n): "a" for n in range(5)}),
    "num_labels": (5,),
    "image_size": ([16, 16], [16, 8]),
    "patch_size": ([8, 8],),
    "torch_dtype": ("float16",),
    "dtype": ("float16",),
    "quantization_config": ({"quant_method": "gptq", "bits": 4},),
    "per_layer_config": ({"0": {"rms_norm_eps": 0.5}},),
    "n_inner": (32, 64),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_key_value_heads"), (2, 4, 8)),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern"), (2, 4, 64)),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), (8, 64)),
    "head_dim": (4, 8),
    "pad_token_id": (-1, 5, 95, 96, 10_000),
    "vocab_size": (95, 97),
    "text_config": ({"model_type": "llama"},),
}
"""Further values of some keys."""
MORE["rope_scaling"] = MORE["rope_parameters"]

ACCEPT = ("__post_init__", "convert_rope_params_to_dict")
"""Methods of config classes that take keys which are not declared."""

UNDECLARED = ("original_max_position_embeddings", "quantization_config", "auto_map", "n_ctx")
"""Keys of published files that these do not tell."""

FAMILIES = {
    "gpt2": (hf.GPT2Config, "gpt2"),
    "gemma2": (hf.Gemma2Config, "gemma2"),
    "gemma3": (hf.Gemma3TextConfig, "gemma3"),
    "gemma3_multimodal": (hf.Gemma3Config, "gemma3"),
    "llama": (hf.LlamaConfig, "llama"),
    "mistral": (hf.MistralConfig, "mistral"),
    "phi3": (hf.Phi3Config, "phi3"),
    "qwen2": (hf.Qwen2Config, "qwen2"),
    "qwen3": (hf.Qwen3Config, "qwen3"),
    "vit": (hf.ViTConfig, "vit"),
}


def main(fixtures: Path, *names: str) -> None:
    """Write the cases: all, or those of some families with the others as they are."""
    target = fixtures / "hf_cases"
    kept: dict[str, Any] = kept_logits(target, names) if names else {}
    before = json.loads((target / "cases.json").read_text())["outcomes"] if names else {}
    odd = json.loads((target / "odd.json").read_text())
    every = {key for each in FAMILIES.values() for key in config_keys(*each)}
    found: dict[str, Any] = {
        "transformers": hf.__version__,
        "values": {key: values_of(key) for key in sorted(every)},
        "odd": {case["name"]: odd_case(fixtures / "hf", case, kept) for case in odd},
        "outcomes": before,
    }
    labels = list(names) or [*FAMILIES, "gemma3_multimodal/text_config"]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for label, (outcomes, logits) in zip(
            labels, pool.map(partial(key_cases, fixtures / "hf"), labels), strict=True
        ):
            found["outcomes"][label] = outcomes
            kept |= logits
            print(f"{label}: {sum(map(len, outcomes.values()))} values of {len(outcomes)} keys")
    (target / "cases.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    logits = np.full((len(kept), SAMPLED), np.nan, np.float32)
    for row, each in zip(logits, kept.values(), strict=True):
        row[: each.size] = each
    np.savez_compressed(target / "logits.npz", names=list(kept), logits=logits)
    greedy(fixtures)


def greedy(fixtures: Path) -> None:
    """Write the likeliest continuations of prompts, in float32."""
    found: dict[str, Any] = {"prompts": PROMPTS, "tokens": {}}
    for name, count in GREEDY.items():
        model = hf.AutoModelForCausalLM.from_pretrained(fixtures / "hf" / name, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        found["tokens"][name] = [
            model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]
    (fixtures / "hf_cases" / "greedy.json").write_text(json.dumps(found) + "\n")


def kept_logits(target: Path, names: Collection[str]) -> dict[str, Any]:
    """Return the logits of the cases that are not tried anew."""
    saved = np.load(target / "logits.npz")
    pairs = zip(saved["names"].tolist(), saved["logits"], strict=True)
    own = {name: row[~np.isnan(row)] for name, row in pairs}
    return {name: row for name, row in own.items() if name.partition("/")[0] not in (*names, "odd")}


def config_keys(config: Any, model: str) -> list[str]:
    """Return the keys of a config class: its attributes, and what code reads of a config."""
    package = f"transformers.models.{model}."
    modules = [configuration_utils, masking_utils, modeling_rope_utils, modeling_utils]
    modules += [sys.modules[package + f"configuration_{model}"], inspect.getmodule(MODELS[model])]
    names = {*vars(config()), *config.attribute_map, *UNDECLARED}
    names |= set(hf.GenerationConfig._get_default_generation_params())
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            names |= _read_of_config(node)
            if isinstance(node, ast.FunctionDef) and node.name in ACCEPT:
                names |= set().union(*map(_taken_keywords, ast.walk(node)))
    methods = {name for name, each in inspect.getmembers(config) if callable(each)}
    hidden = {"_post_init_done", "_auto_class", "__class__", "json"}
    return sorted(name for name in names - methods - hidden if not name.startswith("__"))


def _read_of_config(node: ast.AST) -> set[str]:
    """Return the attributes of a config that a piece of code reads."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        return {node.attr}
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if name in ("getattr", "hasattr") and _is_config(node.args[0]):
        return _texts(node.args[1:2])
    return set()


def _taken_keywords(node: ast.AST) -> set[str]:
    """Return the keywords that a piece of code takes out of its others."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return set()
    source = node.func.value
    taken = node.func.attr in ("get", "pop") and isinstance(source, ast.Name)
    return _texts(node.args[:1]) if taken and source.id == "kwargs" else set()


def _texts(nodes: list[ast.expr]) -> set[str]:
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _is_config(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in ("config", "text_config")
    return isinstance(node, ast.Attribute) and node.attr in ("config", "text_config")


MODELS = {
    "gpt2": hf.GPT2LMHeadModel,
    "gemma2": hf.Gemma2ForCausalLM,
    "gemma3": hf.Gemma3ForCausalLM,
    "llama": hf.LlamaForCausalLM,
    "mistral": hf.MistralForCausalLM,
    "phi3": hf.Phi3ForCausalLM,
    "qwen2": hf.Qwen2ForCausalLM,
    "qwen3": hf.Qwen3ForCausalLM,
    "vit": hf.ViTForImageClassification,
}


def key_cases(source: Path, label: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return one letter for every value of every key of a folder's config.json, and logits.

    Args:
        source: where the folders are.
        label: the name of a folder, and the key of a config inside its own if that is changed.
    """
    base, _, inside = label.partition("/")
    values = json.loads((source / base / "config.json").read_text())
    outcomes: dict[str, str] = {}
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(source / base, Path(place) / "folder"))
        usual = logits_of(folder)
        for key in config_keys(*FAMILIES["gemma3" if inside else base]):
            if is_eager(folder) and "attn_implementation" in key:
                continue
            letters = ""
            for number, value in enumerate(values_of(key)):
                changed = copy.deepcopy(values)
                (changed[inside] if inside else changed)[key] = value
                (folder / "config.json").write_text(json.dumps(changed))
                found = logits_of(folder)
                letters += letter(found, usual)
                if letters[-1] == "d":
                    kept[f"{label}/{key}/{number}"] = sample(found)
            outcomes[key] = letters
    return outcomes, kept


def values_of(key: str) -> tuple[Any, ...]:
    """Return what a key is set to in turn; less for those that are about generating text."""
    if key in hf.GenerationConfig._get_default_generation_params() and key not in MORE:
        return (None, 3, "x")
    return (*VALUES, *MORE.get(key, ()))


def letter(found: Any, usual: Any) -> str:
    """Return what became of a case: it failed, stayed the same, or differs."""
    if found is None or found.shape != usual.shape:
        return "f"
    return "s" if np.abs(found - usual).max() <= 1e-6 * np.abs(usual).max() else "d"


def sample(logits: Any) -> Any:
    """Return some of the logits, spread over all of them."""
    return logits.ravel()[:: max(1, logits.size // SAMPLED)][:SAMPLED].astype(np.float32)


def logits_of(folder: Path) -> Any:
    """Return the logits of a folder's model; None if it cannot be loaded or run."""
    saved = np.load(folder / "expected.npz")
    inputs = {key: torch.tensor(saved[key][:1]) for key in saved if key != "logits"}
    image = "pixel_values" in inputs
    eager = is_eager(folder)
    auto = hf.AutoModelForImageClassification if image else hf.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            size = auto.from_config(hf.AutoConfig.from_pretrained(folder)).num_parameters()
        if size > LARGEST:
            return None
        model, told = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            **({"attn_implementation": "eager"} if eager else {}),
        )
        if told["missing_keys"] or told["mismatched_keys"]:
            return None
        with torch.no_grad():
            logits = model.eval()(**inputs, return_dict=True).logits.numpy()
    except Exception:
        return None
    return logits if np.isfinite(logits).all() else None


def is_eager(folder: Path) -> bool:
    """Whether attention has to be eager: the usual one leaves out the bounds of Gemma 2."""
    return "gemma2" in (folder / "config.json").read_text().lower()


def head(tensors: dict[str, Any]) -> None:
    """Add an output layer of its own."""
    table = next(tensor for key, tensor in tensors.items() if key.endswith(EMBEDDINGS))
    random = np.random.default_rng(1).normal(size=table.shape)
    tensors["lm_head.weight"] = torch.tensor(random.astype(np.float32))


def same_head(tensors: dict[str, Any]) -> None:
    """Add the embedding as an output layer."""
    table = next(tensor for key, tensor in tensors.items() if key.endswith(EMBEDDINGS))
    tensors["lm_head.weight"] = table.clone()


def other_embedding(tensors: dict[str, Any]) -> None:
    """Double the embedding."""
    name = next(key for key in tensors if key.endswith(EMBEDDINGS))
    tensors[name] = tensors[name] * 2


EMBEDDINGS = ("wte.weight", "embed_tokens.weight")

CHANGES = {"head": head, "same_head": same_head, "other_embedding": other_embedding}


def odd_case(source: Path, case: dict[str, Any], kept: dict[str, Any]) -> str:
    """Return what became of a folder with several changes, as a letter."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(source / case["base"], Path(place) / "folder"))
        usual = logits_of(folder)
        apply_case(folder, case)
        found = logits_of(folder)
    outcome = letter(found, usual)
    if outcome == "d":
        kept[f"odd/{case['name']}"] = sample(found)
    return outcome


def apply_case(folder: Path, case: dict[str, Any]) -> None:
    """Change a folder as a case says."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for key, value in case.get("config", {}).items():
        if isinstance(value, dict) and isinstance(values.get(key), dict) and key == "text_config":
            value = {**values[key], **value}
        values[key] = value
    file.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))
    weights = folder / "model.safetensors"
    if "tensors" in case:
        tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
        CHANGES[case["tensors"]](tensors)
        save_file(tensors, weights, metadata={"format": "pt"})
    if "stale" in case:
        tensors = dict(load_file(weights))
        CHANGES[case["stale"]](tensors)
        save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
