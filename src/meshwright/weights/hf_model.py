"""The model of a Hugging Face folder: what builds it, and whether a model has its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from meshwright import models
from meshwright.config.argument_checks import check_path
from meshwright.config.builders import build, check_arguments
from meshwright.errors import UserError
from meshwright.program.trace.build_model import abstract_model
from meshwright.weights.families import read_architecture
from meshwright.weights.hf_folder import CONFIG, Folder, listed, open_folder
from meshwright.weights.kept import published_config


@dataclass(frozen=True)
class HfModel:
    """Builds the model of a folder, with random weights; `Trainer` then loads the folder's.

    Unless ``pretrained`` is False: then training starts from the random ones.
    """

    folder: Folder
    kind: str
    arguments: Mapping[str, Any]
    pretrained: bool = True

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model."""
        builder = models.find_builder(self.kind)
        return build("model", self.kind, builder, {**self.arguments, "rngs": rngs})

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model, whose arguments may differ from the folder's."""
        return published_config(self.kind, self.arguments, self.folder.config)


def check_one_folder(model: Any, weights: str | Path | None) -> None:
    """Refuse a model with the weights of one folder that is to start from those of another."""
    if weights is None or not isinstance(model, HfModel) or not model.pretrained:
        return
    own, other = model.folder.path, Path(weights)
    if own.resolve() != other.expanduser().resolve():
        raise UserError(
            "the weights come from two folders",
            why=f"the model from {own}, and weights={other}",
            fix=f"leave weights out to start from {own}, or write "
            f'mw.hf_model("{own}", pretrained=False) to start from {other}',
        )


def hf_model(folder: str | Path, *, pretrained: bool = True, **changes: Any) -> HfModel:
    """Return what builds the model of a Hugging Face folder; nothing but config.json is read.

    ``mw.Trainer(model=mw.hf_model(folder), …)`` trains from the folder's weights, and
    ``mw.load_model(folder)`` returns the model with them.

    Args:
        folder: a folder with config.json and weights in safetensors files.
        pretrained: False to train the same model from random weights.
        changes: other arguments of the model. With the folder's weights, only those that leave
            what it computes as it was: ``context_length``, and rates of dropout, of which
            ``dropout`` replaces all that are not given.
    """
    opened = open_folder(check_path("folder", folder))
    architecture = read_architecture(opened.config, str(opened.path))
    kind = architecture.family.kind
    arguments = architecture.with_changes(changes)
    if pretrained:
        fix = "leave these out, or write pretrained=False to train from random weights"
        architecture.refuse_contradictions(changes, str(opened.path), fix)
    checked = check_arguments("model", models.find_builder(kind), arguments, supplied=("rngs",))
    return HfModel(opened, kind, checked, pretrained)


_FREE = ("context_length", "pad_token_id")
"""Attributes that may differ from the folder's."""


def check_numbers(model: Any, folder: Folder) -> None:
    """Refuse a built-in model with other numbers than the folder's, which have no shape.

    A model of the user's own classes may compute anything, so it is not compared.
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
