"""Other names that are accepted: further keywords, and what earlier versions called a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from meshwright.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


def also_called(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept further keywords: ``also_called(grads="gradients")`` takes both."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            for other, name in names.items():
                if other not in kwargs:
                    continue
                if name in kwargs:
                    raise UserError(
                        f"{function.__name__} got both {name}= and {other}=",
                        why="they are the same argument",
                        fix=f"write {name}= only",
                    )
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return cast(Callable[P, R], call)

    return decorate


def formerly(name: str) -> property:
    """Return a property that reads an attribute of today's name under its former one."""
    return property(lambda self: getattr(self, name), doc=f"The former name of `{name}`.")


FORMER_KEYS = {
    "update": "step",
    "updates": "steps",
    "flops_per_update": "flops_per_step",
    "seconds_per_update": "seconds_per_step",
}
"""Keys that files of earlier versions have, and what they are called today."""


def with_current_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file with today's keys, which count more if both are there."""
    names = {key: FORMER_KEYS.get(key, key) for key in record}
    return {key if names[key] in record else names[key]: value for key, value in record.items()}
