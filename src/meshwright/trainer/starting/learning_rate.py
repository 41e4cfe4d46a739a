"""The learning rate of steps, as far as it can be found inside an optax optimizer."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.step.optimizer import OptimizerLeaf
from meshwright.step.state import TrainState

_MAKER = "scale_by_learning_rate"
_OTHER_COUNT = ("MultiSteps", "multi_steps", "conditionally_", "apply_if_finite")
"""Wrappers that do not apply every step, so that schedules inside count differently."""
MAX_DEPTH = 24


class LearningRate:
    """The learning rate as a metric, by its schedule or as a leaf of the optimizer, if found."""

    def __init__(
        self, schedule: Callable[[int], Any] | None, leaves: Sequence[OptimizerLeaf]
    ) -> None:
        self._schedule = schedule
        self._leaf = injected_rate(leaves) if schedule is None else None

    def of_step(self, step: int) -> dict[str, float]:
        """Return the learning rate of a step."""
        if self._schedule is None:
            return {}
        return {"learning_rate": rate_at(self._schedule, step - 1)}

    def of_state(self, state: TrainState) -> dict[str, Any]:
        """Return the learning rate that is part of a state, as an array."""
        if self._leaf is None:
            return {}
        # A copy, because the next step reuses the state's memory.
        return {"learning_rate": jnp.copy(state.optimizer[self._leaf])}


def rate_at(schedule: Callable[[int], Any], done: int) -> float:
    """Return the learning rate after this many steps."""
    # On a CPU, where it does not wait for the step.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(schedule(done))


def find_schedule(optimizer: Any) -> Callable[[int], Any] | None:
    """Return the schedule of the learning rate by step; None if there is no single one.

    Optax keeps it in the closure of `optax.scale_by_learning_rate`, and a constant rate as the
    negative step size of the only `optax.scale`.
    """
    schedules: dict[int, Callable[[int], Any]] = {}
    scales: list[Any] = []
    for function in _functions(optimizer, set(), 0):
        name = function.__qualname__
        if name.startswith(_OTHER_COUNT):
            return None
        if name.startswith(f"{_MAKER}."):
            schedule = inspect.getclosurevars(function).nonlocals.get("learning_rate")
            if callable(schedule):
                schedules[id(schedule)] = schedule
        elif name.startswith("scale.") and name.endswith(".update_fn"):
            scales.append(inspect.getclosurevars(function).nonlocals.get("step_size"))
    if not schedules and len(scales) == 1 and isinstance(scales[0], int | float) and scales[0] < 0:
        constant = -float(scales[0])
        return lambda _: constant
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
