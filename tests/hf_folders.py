"""The Hugging Face folders in tests/fixtures/hf, with the logits of transformers."""

import json
import shutil
from pathlib import Path

import numpy as np

HF = Path(__file__).parent / "fixtures" / "hf"
FOLDERS = (
    *("gpt2", "gemma2", "gemma3", "gemma3_multimodal", "llama"),
    *("mistral", "phi3", "qwen2", "qwen3", "vit"),
)
GPT2 = HF / "gpt2"


def expected(name):
    """Return the inputs of a folder's model as it takes them, and the logits of transformers."""
    saved = np.load(HF / name / "expected.npz")
    if "pixel_values" in saved:
        return saved["pixel_values"].transpose(0, 2, 3, 1), saved["logits"]
    return saved["input_ids"], saved["logits"]


def copy_folder(name, target):
    """Copy a folder of the fixtures, to be changed."""
    shutil.copytree(HF / name, target)
    return target


def change_config(folder, **changes):
    """Change values of a config.json; None leaves a key out."""
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def saved_tensors(folder):
    """Read all tensors of a folder with the library of the format, as bits and formats."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "flax") as opened:
            names = opened.keys()
            found |= {name: np.asarray(opened.get_tensor(name)) for name in names}
    return found
