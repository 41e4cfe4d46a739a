"""What Meshwright knows about a family of published models: names, views, and config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.errors import UserError
from meshwright.weights.config_values import complete
from meshwright.weights.views import TRANSPOSED, VECTOR, View

HfConfig = Mapping[str, Any]
"""The content of a config.json."""


class TensorRow(NamedTuple):
    """Where an array of the model is in the files; ``{n}`` stands for the number of a block.

    Attributes:
        path: the canonical path in the model.
        name: the name in the file.
        view: how the array is found in the tensor.
    """

    path: str
    name: str
    view: View

    def match(self, path: str) -> TensorRow | None:
        """Return the row for a path in the model; None if it is about another."""
        found = re.fullmatch(re.escape(self.path).replace(r"\{n\}", r"(\d+)"), path)
        if found is None:
            return None
        return TensorRow(path, self.name.replace("{n}", (*found.groups(), "")[0]), self.view)


def layer_rows(
    path: str, name: str, kernel: View = TRANSPOSED, bias: View = VECTOR
) -> tuple[TensorRow, TensorRow]:
    """Return the rows of a linear layer: its kernel and its bias."""
    return (
        TensorRow(f"{path}.kernel", f"{name}.weight", kernel),
        TensorRow(f"{path}.bias", f"{name}.bias", bias),
    )


def norm_rows(path: str, name: str) -> tuple[TensorRow, TensorRow]:
    """Return the rows of a norm: its scale and its bias."""
    return (
        TensorRow(f"{path}.scale", f"{name}.weight", VECTOR),
        TensorRow(f"{path}.bias", f"{name}.bias", VECTOR),
    )


@dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
        kind: the model's kind in Meshwright.
        architecture: what its config.json says, and what exports are called.
        model_type: the other name in its config.json.
        rows: which array of the model is in which tensor.
        defaults: the values that config.json may leave out.
        keys: the key of config.json that holds an argument of the model, by argument.
        arguments: from config.json, completed by the defaults, to the other arguments.
        config: from the arguments of the model, and the config.json that its weights came with if
            any, to the other values of config.json.
        supported: the values that the model supports of some keys of config.json; a missing key has
            the first.
        optional: keys of config.json without a default, each with a value of its type.
        other_architectures: further architectures whose weights are read.
        spellings: patterns of names that are spelled differently in some files, and what the rows
            call them.
        ignored: patterns of names without values that the model needs.
        skipped: patterns of names of a part that is left out, and what it is called.
        free: arguments that may differ from the folder's.
        sizes: named dims of views that only the arguments tell.
    """

    kind: str
    architecture: str
    model_type: str
    rows: tuple[TensorRow, ...]
    defaults: Mapping[str, Any]
    keys: Mapping[str, str]
    arguments: Callable[[HfConfig], dict[str, Any]]
    config: Callable[[Mapping[str, Any], HfConfig], dict[str, Any]]
    supported: Mapping[str, tuple[Any, ...]]
    optional: Mapping[str, Any] = field(default_factory=dict[str, Any])
    other_architectures: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    skipped: tuple[str, str] | None = None
    free: tuple[str, ...] = ()
    sizes: Callable[[Mapping[str, Any]], dict[str, int]] = lambda _: {}

    def spell(self, name: str) -> str:
        """Return a name in a file as the rows spell it."""
        for pattern, replacement in self.spellings:
            name = re.sub(pattern, replacement, name, count=1)
        return name

    def read_config(self, config: HfConfig) -> dict[str, Any]:
        """Return the arguments of the model; refuse what the model does not support."""
        for key, allowed in self.supported.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise UserError(
                    f"this {self.architecture} is not supported",
                    why=f"its config.json says {key}={value}, and model.kind={self.kind} supports "
                    + " or ".join(map(str, allowed)),
                )
        values = complete(config, self.defaults, self.optional)
        same = {argument: values[key] for argument, key in self.keys.items() if key in values}
        return same | self.arguments(values)

    def write_config(self, arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
        """Return the values of config.json for the arguments of the model, the inverse."""
        same = {key: arguments[argument] for argument, key in self.keys.items()}
        return same | self.config(arguments, kept)
