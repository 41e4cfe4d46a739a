"""Whether a model computes with the numbers of a folder's config.json, such as rotary bases."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from flax import nnx

from meshwright.errors import UserError
from meshwright.program.trace.build_model import abstract_model
from meshwright.weights.hf_folder import CONFIG, Folder, listed
from meshwright.weights.hf_model import hf_model

_FREE = ("context_length",)
"""Attributes that may differ from the folder's."""


def check_numbers(model: Any, folder: Folder) -> None:
    """Refuse a built-in model with other numbers than the folder's, which have no shape.

    A model of the user's own classes may compute anything, so it is not compared.

    Args:
        model: the model; its arrays may be shapes.
        folder: the folder whose weights it gets.
    """
    published = abstract_model(hf_model(folder.path))
    if type(model) is not type(published):
        return
    own, theirs = _numbers(model), _numbers(published)
    differing = [
        f"{name} is {own[name]} in the model and {theirs[name]} by {CONFIG}"
        for name in own
        if name in theirs and own[name] != theirs[name]
    ]
    if differing:
        raise UserError(
            f"the model is not the one in {folder.path}",
            why=listed(differing, quote=""),
            fix="build it with mw.hf_model(folder)",
        )


def _numbers(model: Any) -> dict[str, Any]:
    """Return the numbers, and records of numbers, among the attributes of a model's modules."""
    found: dict[str, Any] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.Dropout):
            for name, value in vars(node).items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if (number or is_dataclass(value)) and name not in _FREE:
                    found[".".join(map(str, (*path, name)))] = value
    return found
