"""What must be the same in every process of a run, or they would wait for each other.

Settings inside optimizers and losses are compared as plain values. An optax transformation is a
pair of functions, and its settings are what these functions close over. The same goes for losses
made by other functions, partial functions and bound methods.
"""

import functools
import hashlib
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshwright.config.builders import defaults_of
from meshwright.data.contents import data_fingerprint
from meshwright.processes.handshake import Facts, describe_own_devices
from meshwright.runtime.versions import own_code, package_versions, users_code
from meshwright.step.assemble import Assembled
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.trainer_settings import TrainerSettings

_PLUMBING = {"init", "update", "init_fns", "update_fns", "with_extra_args_support", "tx"}
"""Names inside of optax that say nothing about a setting."""

MAX_DEPTH = 24
"""Functions may close over each other; deeper settings are not compared."""


def process_facts(trainer: TrainerSettings, asked: FitSettings, assembled: Assembled) -> Facts:
    """Return what must be the same in every process."""
    assert asked.data is not None
    assert asked.duration is not None
    task = None if asked.recipe is None else asked.recipe.task
    return {
        **({"config": asked.config} if asked.config else _python_settings(trainer)),
        "plan": assembled.plan.model_dump(mode="json"),
        "model": {
            leaf.path: f"{leaf.role} {leaf.dtype}{list(leaf.shape)}"
            for leaf in assembled.traced.layout.leaves
        },
        "data": data_fingerprint(asked.data, trainer.seed).text,
        "duration": asdict(asked.duration),
        "seed": trainer.seed,
        "eval_every": asked.eval_every,
        "eval_batches": asked.eval_batches,
        "eval_data": None
        if asked.eval_data is None
        else data_fingerprint(asked.eval_data, trainer.seed).text,
        "log_every": trainer.log_every,
        "checkpoint": asked.checkpoint.model_dump(mode="json"),
        "nonfinite": [trainer.on_nonfinite, trainer.max_skipped, trainer.max_rewinds],
        "run_dir": None if asked.run_dir is None else str(asked.run_dir),
        "version": {**package_versions(), "meshwright code": own_code()},
        "devices": describe_own_devices(),
        "code": users_code(trainer.model, trainer.loss, trainer.eval_loss, task, *asked.callbacks),
    }


def _python_settings(trainer: TrainerSettings) -> Facts:
    return {
        "optimizer": optimizer_settings(trainer.optimizer),
        "loss": comparable(trainer.loss),
        "eval_loss": comparable(trainer.eval_loss),
        "clip_norm": trainer.clip_norm,
        "ema_decay": trainer.ema_decay,
    }


def comparable(value: Any) -> dict[str, Any]:
    """Return the plain values that a function, or an object with functions, depends on.

    Numbers, texts and arrays are found in closures, default arguments, partial arguments,
    attributes and the globals a function names; arrays become digests. What cannot be compared
    between processes, such as an object without attributes, is left out.
    """
    collector = _Collector()
    collector.visit(value, "", 0)
    return collector.values


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optax transformation: ``chain.2.scale.step_size`` and the like."""
    return {
        ".".join(part for part in key.split(".") if part not in _PLUMBING): value
        for key, value in comparable(optimizer).items()
    }


class _Collector:
    """Collects values by dotted path."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._seen: set[int] = set()

    def visit(self, value: Any, path: str, depth: int) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
            self.values[path or "value"] = _plain(value)
        elif depth > MAX_DEPTH or id(value) in self._seen:
            return
        elif isinstance(value, np.ndarray | jax.Array):
            self._array(value, path)
        else:
            self._seen.add(id(value))
            self._inside(value, path, depth + 1)

    def _inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, type):
            self.values[path or "value"] = value.__qualname__
        elif isinstance(value, Mapping):
            self._named({str(key): each for key, each in value.items()}, path, depth)
        elif isinstance(value, tuple) and (fields := getattr(value, "_fields", ())):
            self._named(dict(zip(fields, value, strict=True)), path, depth)
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            self._named({str(i): each for i, each in enumerate(value)}, path, depth)
        elif isinstance(value, functools.partial):
            self.visit(value.func, path, depth)
            self._named({"args": value.args, **value.keywords}, path, depth)
        elif inspect.ismethod(value):
            self.visit(value.__func__, path, depth)
            self.visit(value.__self__, path, depth)
        elif inspect.isfunction(value):
            self._function(value, path, depth)
        elif not isinstance(value, types.ModuleType) and hasattr(value, "__dict__"):
            self.values[_join(path, "type")] = type(value).__qualname__
            self._named(vars(value), path, depth)

    def _named(self, values: Mapping[str, Any], path: str, depth: int) -> None:
        for name, value in values.items():
            self.visit(value, _join(path, name), depth)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        # Functions inside of others are called alike (`update_fn`); the outer name says more.
        path = _join(path, function.__qualname__.partition(".<locals>")[0])
        cells = function.__closure__ or ()
        closed = dict(zip(function.__code__.co_freevars, map(_content, cells), strict=True))
        used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        plain = {k: v for k, v in used.items() if isinstance(v, bool | int | float | str)}
        self._named({**defaults_of(function), **plain, **closed}, path, depth)

    def _array(self, array: Any, path: str) -> None:
        if isinstance(array, jax.Array) and (
            isinstance(array, Tracer) or not array.is_fully_addressable
        ):
            return
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        content = np.asarray(array)
        if content.size == 1:
            self.values[path or "value"] = _plain(content.reshape(())[()])
            return
        digest = hashlib.sha256(content.tobytes()).hexdigest()[:12]
        self.values[path or "value"] = f"{content.dtype}{list(content.shape)} {digest}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable has not been assigned yet.
        return None


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _join(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
