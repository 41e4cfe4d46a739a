"""Noticing that a model changes Python attributes in its call, which a compiled step cannot repeat.

`nnx.jit` compiles again after each such change, and trains with it; a step is compiled once. It
raises in its second call if an array is kept on ``self`` outside of a variable.
"""

import copy
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from meshwright.errors import UserError
from meshwright.program.jaxpr.names import path_text

_DATA = (nnx.Pytree, nnx.Variable, jax.Array, np.ndarray)
_FIX = "keep it in a variable made in the constructor: self.{name} = nnx.Variable(jnp.asarray(…))"


@dataclass(frozen=True)
class AttributeChange:
    """An attribute of a module that a call has changed: its path, name and new value."""

    path: tuple[Any, ...]
    name: str
    value: Any

    @property
    def text(self) -> str:
        """The attribute's path."""
        return path_text((*self.path, self.name))


class PythonState:
    """The Python attributes of a model before a call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = dict(_attributes(model))
        self._contents = {
            key: copy.copy(value)
            for key, value in self._before.items()
            if isinstance(value, list | dict | set)
        }

    def changes(self) -> list[AttributeChange]:
        """Return what has changed; lists, dicts and sets get their contents back."""
        after = dict(_attributes(self._model))
        changed = [
            AttributeChange(path, name, after.get((path, name)))
            for path, name in dict.fromkeys([*self._before, *after])
            if not _same(self._before, after, (path, name))
        ]
        for key, contents in self._contents.items():
            value = self._before[key]
            if not _equal(value, contents):
                changed.append(AttributeChange(*key, copy.copy(value)))
                value.clear()
                value.extend(contents) if isinstance(value, list) else value.update(contents)
        return changed


def apply_changes(model: Any, changes: list[AttributeChange]) -> None:
    """Set the attributes of a model as a call has left them."""
    if not changes:
        return
    modules = {tuple(path): module for path, module in nnx.iter_modules(model)}
    for change in changes:
        current = getattr(modules[change.path], change.name, None)
        # A list that was changed in place is seen by nnx.jit only while it traces.
        if not isinstance(current, list | dict | set):
            setattr(modules[change.path], change.name, change.value)


def refuse_kept_arrays(changes: list[AttributeChange]) -> None:
    """Raise if an array of the call is kept on a module."""
    for change in changes:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(change.value)):
            raise UserError(
                f"the model keeps an array of its call in `{change.text}`",
                why="the array exists only while the step is compiled; under nnx.jit the second "
                "call fails for the same reason",
                fix="return it, or "
                f"self.sow(nnx.Intermediate, {change.name!r}, …); if later calls read it, "
                + _FIX.format(name=change.name),
            )


def refuse_effect(changes: list[AttributeChange]) -> None:
    """Raise because the next call would compute something else."""
    change = changes[0]
    raise UserError(
        f"the model changes `{change.text}` in its call, and then computes something else",
        why=f"it is {change.value!r} after the first call; a step is compiled once, so every "
        "step would compute what the first does (nnx.jit would compile again for each)",
        fix=_FIX.format(name=change.name),
    )


def describe_changes(changes: list[AttributeChange]) -> list[str]:
    """Return warnings about changes that every call makes."""
    return [
        f"the model changes `{change.text}` in its call; a step is compiled once, so this happens "
        f"once and not in every step; {_FIX.format(name=change.name)}"
        for change in changes
    ]


def _attributes(model: Any) -> list[tuple[tuple[tuple[Any, ...], str], Any]]:
    return [
        ((tuple(path), name), value)
        for path, module in nnx.iter_modules(model)
        # The bridge to Linen writes a module's variables to attributes in every call.
        if not isinstance(module, nnx.bridge.ToNNX)
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
        and (isinstance(value, Tracer) or not isinstance(value, _DATA))
    ]


def _same(before: dict[Any, Any], after: dict[Any, Any], key: Any) -> bool:
    if key in before and key in after:
        return before[key] is after[key] or _equal(before[key], after[key])
    # An attribute that became data, or was data, is compared as a leaf of the model.
    return key in before and not isinstance(before[key], Tracer)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # What cannot be compared, such as containers of arrays, is the same only if identical.
        return False
