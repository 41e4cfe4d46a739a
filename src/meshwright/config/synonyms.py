"""Names that other tools use for settings, and shorthands for several settings at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

SYNONYMS = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "batch": "global_batch_size",
    "per_device_batch_size": "micro_batch_size",
    "epochs": "max_duration",
    "num_epochs": "max_duration",
    "max_time": "max_duration",
    "num_steps": "steps",
    "max_steps": "steps",
    "train_steps": "steps",
    "iterations": "steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "gradient_clip": "clip_norm",
    "warmup": "warmup_steps",
    "scheduler": "schedule",
    "lr_schedule": "schedule",
    "name": "kind",
    "type": "kind",
    "eval_steps": "eval_every",
    "save_every": "every",
    "save_steps": "every",
    "log_steps": "log_every",
    "random_seed": "seed",
    "output_dir": "hydra.run.dir",
    "run_dir": "hydra.run.dir",
    "out_dir": "hydra.run.dir",
}
"""What others call a setting, by the last part of its key."""

_VALUES = {
    "kernels": {"cudnn": "auto", "flash": "auto", "off": "none", "false": "none", "no": "none"},
}
"""What others call the values of a setting, by its key."""

_MESH = re.compile(r"""\+{0,2}mesh=(['"]?)(\w+=-?\d+(?:\s*,\s*\w+=-?\d+)*)\1""")
_OWN_KIND = re.compile(r"\+{0,2}(model|task|data|optimizer)=([\w.]+:[\w.]+)")


def meant_keys(name: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that are meant by a name others use, the last part of a key."""
    meant = SYNONYMS.get(name, "")
    if "." in meant:
        return [meant]
    return [key for key in known if meant and key.rpartition(".")[2] == meant]


def suggest_value(key: str, written: object, choices: Sequence[str]) -> str:
    """Return ``did you mean `x`?`` for the nearest choice, ignoring case and hyphens, or nothing.

    Args:
        key: the setting.
        written: its value, which is none of the choices.
        choices: the values it can have.
    """
    names = {**_VALUES.get(key, {}), **{choice: choice for choice in choices}}
    word = str(written).lower().replace("-", "_")
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean `{names[near[0]]}`?" if near else ""


def expand_shorthands(text: str) -> list[str]:
    """Return the overrides that one stands for.

    ``mesh=fsdp=4,tensor=2`` is how Python writes a mesh, and ``model=package.module:Net`` names a
    builder where a file is expected.
    """
    if mesh := _MESH.fullmatch(text):
        return [f"mesh.{part.strip()}" for part in mesh[2].split(",")]
    if kind := _OWN_KIND.fullmatch(text):
        return [f"{kind[1]}.kind={kind[2]}"]
    return [text]
