"""The learning rate inside an optax optimizer, where it can be found."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.step.optimizer import OptimizerLeaf

_MAKER = "scale_by_learning_rate"
_OTHER_COUNT = ("MultiSteps", "multi_steps", "conditionally_", "apply_if_finite")
"""Wrappers that do not update at every update, so that schedules inside count otherwise."""
MAX_DEPTH = 24


def find_schedule(optimizer: Any) -> Callable[[int], Any] | None:
    """Return the schedule of the learning rate by update; None if there is no single one.

    Optax keeps it in the closure of `optax.scale_by_learning_rate`.
    """
    schedules: dict[int, Callable[[int], Any]] = {}
    for function in _functions(optimizer, set(), 0):
        name = function.__qualname__
        if name.startswith(_OTHER_COUNT):
            return None
        if name.startswith(f"{_MAKER}."):
            schedule = inspect.getclosurevars(function).nonlocals.get("learning_rate")
            if callable(schedule):
                schedules[id(schedule)] = schedule
    return next(iter(schedules.values())) if len(schedules) == 1 else None


def injected_rate(leaves: Sequence[OptimizerLeaf]) -> int | None:
    """Return the number of the state's leaf in which `optax.inject_hyperparams` keeps the rate."""
    numbers = [
        number
        for number, leaf in enumerate(leaves)
        if leaf.path.endswith("hyperparams.learning_rate") and not leaf.shape
    ]
    return numbers[0] if len(numbers) == 1 else None


def _functions(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the functions that a transformation consists of."""
    if depth > MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    inner: Sequence[Any] = ()
    if inspect.isfunction(value):
        yield value
        inner = list(inspect.getclosurevars(value).nonlocals.values())
    elif inspect.ismethod(value):
        inner = [value.__func__, *vars(value.__self__).values()]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    for each in inner:
        yield from _functions(each, seen, depth + 1)
