"""Checks of arguments that several public functions share."""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from meshwright.config.base import shorten
from meshwright.errors import ANY, UserError, did_you_mean

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

MOST_SAMPLES = 2**31 - 1
"""A batch or a dataset with more samples is a typo."""


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], fix: str) -> None:
    """Refuse an argument of the wrong type; ``fix`` says what to write instead."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise wrong_kind(name, value, fix)


def wrong_kind(name: str, value: Any, fix: str) -> UserError:
    """Return the error for an argument of the wrong type."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    what = "it is" if isinstance(value, type) else "it is of type"
    return UserError(f"{name}={shorten(repr(value))} is not valid", why=f"{what} {kind}", fix=fix)


def check_count(name: str, count: Any, most: int = 2**63 - 1, least: int = 1) -> None:
    """Refuse anything but a whole number from ``least`` to ``most``."""
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not whole or not least <= count <= most:
        size = f"it is less than {least}" if whole and count < least else f"it is more than {most}"
        raise UserError(
            f"{name}={shorten(repr(count))} is not valid",
            why=size if whole else f"it is of type {type(count).__name__}",
            fix=f"write {name} as a whole number, {least} or more",
        )


class WrongArguments(UserError, TypeError):
    """Arguments that a call does not take, or lacks."""


def clear_arguments(
    name: str, place: Callable[[str, Sequence[str]], str] = lambda unknown, own: ""
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Make a function refuse arguments that it does not take, or lacks, with what to write.

    ``place`` says, from an unknown argument and the function's own, where it belongs, if anywhere.
    """

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: Arguments.args, **given: Arguments.kwargs) -> Returned:
            _check_arguments(name, signature, place, args, given)
            return function(*args, **given)

        return checked

    return decorate


def _check_arguments(
    name: str,
    signature: inspect.Signature,
    place: Callable[[str, Sequence[str]], str],
    args: tuple[Any, ...],
    given: dict[str, Any],
) -> None:
    own = [each for each in signature.parameters if each != "self"]
    for unknown in given:
        if unknown not in own:
            fix = place(unknown, own) or did_you_mean(unknown, own)
            raise WrongArguments(
                f"{name} has no argument {unknown}", fix=fix or f"its arguments: {', '.join(own)}"
            )
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        needed = [
            each
            for each, parameter in signature.parameters.items()
            if each != "self" and parameter.default is parameter.empty
        ]
        named = ", ".join(f"{each}={ANY}" for each in dict.fromkeys([*needed, *given]))
        raise WrongArguments(
            f"{name} cannot be called like this", why=str(error), fix=f"write {name}({named})"
        ) from None


def check_takes(name: str, function: Any, arguments: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these positional arguments."""
    written = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise wrong_kind(name, function, f"write a function {written}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{name} cannot be called as {written}",
            why=f"{getattr(function, '__name__', name)}{signature}: {error}",
            fix=f"write a function {written}",
        ) from None


def check_path(name: str, path: Any) -> Path:
    """Return an argument as a path, or refuse it."""
    check_kind(name, path, (str, os.PathLike), f'write {name} as a path, such as "runs/first"')
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UserError(f"{name}={text!r} is not a path", fix='write one, such as "runs/first"')
    return Path(text)


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not an optax transformation, and say what to write instead."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    if isinstance(optimizer, int | float):
        fix = f"write optimizer=optax.adamw({optimizer}) if it is a learning rate"
    elif isinstance(optimizer, str):
        fix = f"write optimizer=optax.{optimizer}(…) if it is the name of one"
    elif callable(optimizer):
        fix = f"call it: optimizer={getattr(optimizer, '__name__', 'optimizer')}(…)"
    else:
        fix = "write one such as optax.adamw(3e-4)"
    raise UserError(
        f"the optimizer is {shorten(optimizer)}, of type {type(optimizer).__name__}",
        why="it must be an optax transformation, with init and update",
        fix=fix,
    )


def check_clip_norm(norm: Any) -> None:
    """Refuse what is not a positive number."""
    if norm is None:
        return
    if not isinstance(norm, int | float | np.number):
        what, why = f"clip_norm={norm!r} is not valid", f"it is of type {type(norm).__name__}"
    elif not norm > 0:
        what = f"clip_norm={norm} would stop all learning"
        why = "gradients are scaled down to this norm"
    else:
        return
    raise UserError(what, why=why, fix="write clip_norm=1.0, or None for no clipping")
