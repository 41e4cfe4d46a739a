"""What Meshwright knows about a family of published models: names, views, and config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.weights.config_values import Key, complete
from meshwright.weights.views import TRANSPOSED, VECTOR, View

HfConfig = Mapping[str, Any]
"""The content of a config.json."""


class TensorRow(NamedTuple):
    """Where an array of the model is in the files; ``{n}`` stands for the number of a block."""

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
        rows: which array of the model is in which tensor.
        keys: what the keys of config.json mean; those of `WITHOUT_EFFECT` may be there too.
        arguments: from config.json, completed by defaults, to the arguments that no key holds.
        config: from the arguments of the model, and the config.json that its weights came with if
            any, to the other values of config.json.
        aliases: other names of keys, which transformers prefers to their own.
        outer: keys of a config.json of ``outer_type``, with the text model's in ``text_config``.
        spellings: patterns of names that some files spell differently, and what the rows call them.
        ignored: patterns of names without values that the model needs.
        skipped: patterns of names of a part that is left out, and what it is called.
        free: arguments that may differ from the folder's.
        sizes: named dims of views that only the arguments tell.
    """

    kind: str
    architecture: str
    model_type: str
    rows: tuple[TensorRow, ...]
    keys: Mapping[str, Key]
    arguments: Callable[[HfConfig], dict[str, Any]]
    config: Callable[[Mapping[str, Any], HfConfig], dict[str, Any]]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    outer: Mapping[str, Key] = field(default_factory=dict[str, Key])
    outer_type: str | None = None
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

    @property
    def architectures(self) -> tuple[str, ...]:
        """What a config.json may call the model."""
        return self.architecture, *self.other_architectures

    @property
    def rates(self) -> tuple[str, ...]:
        """Arguments of the model that are rates of dropout."""
        return tuple(name for name in self.free if name.endswith("dropout"))

    @property
    def embedding(self) -> str:
        """The name of the tensor that is also the output layer where they are tied."""
        return next(row.name for row in self.rows if row.path.endswith("tokens.embedding"))

    def own_names(self, config: HfConfig) -> dict[str, Any]:
        """Return a config.json without aliases, which count more than the names they stand for."""
        others = {key: value for key, value in config.items() if key not in self.aliases}
        return others | {self.aliases[key]: config[key] for key in self.aliases.keys() & config}

    def read_config(self, config: HfConfig) -> dict[str, Any]:
        """Return the arguments of the model; refuse what the model does not support."""
        values = complete(self.own_names(config), self.keys, self.architecture)
        same = {rule.argument: values[key] for key, rule in self.keys.items() if rule.argument}
        return same | self.arguments(values)

    def write_config(self, arguments: Mapping[str, Any], kept: HfConfig) -> dict[str, Any]:
        """Return the values of config.json for the arguments of the model, the inverse."""
        same = {key: arguments[rule.argument] for key, rule in self.keys.items() if rule.argument}
        return same | self.config(arguments, kept)
