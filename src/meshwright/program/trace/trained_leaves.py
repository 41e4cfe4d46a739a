"""What of a model is trained: variables by filter or path, and adapters."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.config.lora_section import LoRA
from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.names import matches, path_text

NEAREST = 5
"""How many paths a message lists at most."""


@dataclass(frozen=True)
class PathFilter:
    """An NNX filter of the parameters whose paths match one of some patterns."""

    patterns: tuple[str, ...]

    def __call__(self, path: Any, value: Any) -> bool:
        """Whether a variable is a parameter with such a path."""
        is_param = nnx.filterlib.to_predicate(nnx.Param)(path, value)
        return is_param and any(matches(pattern, path_text(path)) for pattern in self.patterns)


@dataclass(frozen=True)
class Adapted:
    """A model whose adapters are trained, and also the variables of an NNX filter."""

    also: Filter
    lora: LoRA


Trained = Filter | Adapted
"""What is trained: variables by an NNX filter, or adapters."""


def trained_by(given: Any, lora: LoRA | None) -> Trained:
    """Return what is trained, from a filter or path patterns, and adapters."""
    listed = isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)
    own: Any = PathFilter(tuple(given)) if listed and given else given
    if lora is None or lora.rank is None:
        return own
    return Adapted(nnx.Nothing() if own is nnx.Param else own, lora)


def check_patterns(key: str, patterns: Sequence[str], paths: Sequence[str], what: str) -> None:
    """Refuse a pattern that matches none of these paths."""
    for pattern in patterns:
        if not any(matches(pattern, path) for path in paths):
            near = difflib.get_close_matches(pattern, _patterns(paths), NEAREST, 0.5)
            few = ", ".join(f"`{path}`" for path in near or paths[:NEAREST])
            raise UserError(
                f"the pattern `{pattern}` of {Setting(key)} matches no {what}",
                why=f"of its {len(paths)} paths and their patterns, the nearest are {few}",
                fix="write one of these: * is one part of a path, ** any number of them",
            )


def _patterns(paths: Sequence[str]) -> list[str]:
    """Return patterns of paths: of the same weight in every block, and of whole modules."""
    same = dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in paths)
    parts = [path.split(".") for path in same]
    modules = [".".join([*each[:n], "**"]) for each in parts for n in range(1, len(each))]
    return list(dict.fromkeys([*same, *modules, *paths]))
