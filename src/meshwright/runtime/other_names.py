"""Further keywords that functions accept."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
