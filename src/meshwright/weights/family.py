"""What Meshwright knows about a family of published models: names, views, and config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.errors import UserError
from meshwright.weights.config_values import complete
from meshwright.weights.views import View

HfConfig = Mapping[str, Any]
"""The content of a config.json."""


class Row(NamedTuple):
    """A line of a family's table; ``{n}`` stands for the number of a block.

    Attributes:
        path: the canonical path in the model.
        name: the name in the file.
        view: how the array is found in the tensor.
    """

    path: str
    name: str
    view: View

    def match(self, path: str) -> str | None:
        """Return the name for a path in the model; None if the row is about another."""
        found = re.fullmatch(re.escape(self.path).replace(r"\{n\}", r"(\d+)"), path)
        return None if found is None else self.name.replace("{n}", (*found.groups(), "")[0])


@dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
        kind: the model's kind in Meshwright.
        architecture: what its config.json says, and what exports are called.
        model_type: the other name in its config.json.
        rows: which array of the model is in which tensor.
        defaults: the values that config.json may leave out.
        arguments: from config.json, completed by the defaults, to the arguments of the model.
        config: from the arguments of the model, and the config.json that its weights came with if
            any, to config.json.
        computes: keys of config.json of which the model computes only these values; a key that is
            missing has the first.
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
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any]
    arguments: Callable[[HfConfig], dict[str, Any]]
    config: Callable[[Mapping[str, Any], HfConfig], dict[str, Any]]
    computes: Mapping[str, tuple[Any, ...]]
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
        """Return the arguments of the model; refuse what the model does not compute."""
        for key, allowed in self.computes.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise UserError(
                    f"this {self.architecture} cannot be computed",
                    why=f"its config.json says {key}={value}, and model.kind={self.kind} computes "
                    + " or ".join(map(str, allowed)),
                )
        return self.arguments(complete(config, self.defaults, self.optional))
