"""Evaluation and prediction: the trained model in eval mode on every sample of some data."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshwright.data.batches import form_of
from meshwright.data.elements import Expected
from meshwright.data.protocols import Data
from meshwright.data.user_data import as_data
from meshwright.errors import UserError
from meshwright.planner.fit.out_of_memory import MemoryAdvice
from meshwright.runtime.activity import activity
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.step.average import no_average
from meshwright.step.state import TrainState
from meshwright.trainer.evaluating.every_sample import EverySample, no_data
from meshwright.trainer.programs import Programs

EVAL_SAMPLES = "eval_samples"
"""The metric that says on how many samples an evaluation was."""

MAX_IN_FLIGHT = 2
"""Batches dispatched to the devices before the first of them is waited for."""


class Evaluator:
    """Evaluates training states, or their moving averages, on held-out data.

    The model runs in eval mode: without dropout, and with its running batch statistics. Every
    sample counts once, of at most ``limit`` batches as large as those of training.
    """

    def __init__(
        self, programs: Programs, data: Data, *, limit: int | None, ema: bool = False
    ) -> None:
        self._programs, self._ema = programs, ema
        if ema and not programs.assembled.step.optimizer.averages:
            raise no_average()
        self._parts = {
            name: EverySample(programs.assembled, part, limit=limit)
            for name, part in (data.parts or {"": data}).items()
        }
        self.samples = next(iter(self._parts.values()))
        self._first = self.samples.first()

    def __call__(self, state: TrainState, warn: Callable[[str], None]) -> dict[str, float]:
        """Return the mean loss and metrics, and the number of samples as ``eval_samples``.

        Of data in parts, also the loss of each, as ``loss.`` with its name.
        """
        sums, num_samples = _Sums(), 0
        alone = {name: _Sums() for name in self._parts if name}
        assembled, heartbeat = self._programs.assembled, own_heartbeat()
        with ExitStack() as stack:
            advice = MemoryAdvice(assembled).during(lambda: "evaluating", trains=False)
            stack.enter_context(advice)
            state = assembled.averaged(state) if self._ema else state
            leaves, report = assembled.step.leaf_values(state), None
            for name, batch in ((name, b) for name, part in self._parts.items() for b in part):
                heartbeat.tick()
                self._check_structure(batch.arrays)
                arrays = jax.tree.leaves(batch.arrays)
                run = self._programs.evaluation(arrays, batch.num_microbatches, warn)
                # After the first program is compiled, which is a separate activity.
                if report is None:
                    report = stack.enter_context(activity("evaluating", afterwards=False))
                    report(self._how_far(0))
                values = run(leaves, arrays)
                for each in filter(None, (sums, alone.get(name))):
                    each.add(values)
                num_samples += batch.num_samples
                report(self._how_far(num_samples))
            if not num_samples:
                raise no_data()
            losses = {f"loss.{name}": own.means()["loss"] for name, own in alone.items()}
            return {**sums.means(), **losses, EVAL_SAMPLES: num_samples}

    def _how_far(self, done: int) -> str:
        each = [part.num_samples for part in self._parts.values()]
        total = f" of {sum(n or 0 for n in each):,}" * (None not in each)
        return f"{done:,}{total} samples"

    def note(self) -> str:
        """Say how many samples are used where that is a choice; empty if all are."""
        return self.samples.note()

    def compile_ahead(self) -> None:
        """Begin to compile what evaluations will run, in another thread."""
        for part in self._parts.values():
            for batch in part.shapes(self._first):
                leaves = jax.tree.leaves(batch.arrays)
                self._programs.compile_evaluation_ahead(leaves, batch.num_microbatches)

    def check(self) -> None:
        """Raise if the data are not like what the loss was traced with."""
        first = self._first
        self._check_structure(first)
        trained = self._programs.assembled.traced.batch
        for leaf, array in zip(trained, jax.tree.leaves(first), strict=True):
            if np.dtype(leaf.dtype).kind != np.asarray(array).dtype.kind:
                raise UserError(
                    f"`{leaf.path}` of the data to evaluate on is {np.asarray(array).dtype}",
                    why=f"the loss was trained on {np.dtype(leaf.dtype)}",
                    fix="give arrays of the same type",
                )

    def _check_structure(self, batch: Any) -> None:
        expected = self._programs.assembled.batch_tree
        if jax.tree.structure(batch) != expected:
            needed = form_of(jax.tree.unflatten(expected, [np.zeros(1)] * expected.num_leaves))
            raise UserError(
                "the data to evaluate on has other arrays than the training data",
                why=f"it has {', '.join(form_of(batch).arrays)}; the loss was trained on "
                f"{', '.join(needed.arrays)}",
                fix="give the same arrays, or compute predictions with predict(…)",
            )


class _Sums:
    """Adds up totals and weights in float64, waiting for the devices a few batches late."""

    def __init__(self) -> None:
        self._in_flight: deque[Any] = deque()
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, values: Any) -> None:
        self._in_flight.append(values)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._read()

    def means(self) -> dict[str, float]:
        while self._in_flight:
            self._read()
        return {
            name: total / weight if weight else float(np.nan)
            for name, (total, weight) in self._totals.items()
        }

    def _read(self) -> None:
        for name, value in jax.device_get(self._in_flight.popleft()).items():
            total, weight = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (total + float(value.total), weight + float(value.weight))


@dataclass(frozen=True)
class _OfArray:
    """A function of a bare array, for data that is one."""

    function: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.function(model, batch["batch"])


def apply_model(model: Any, batch: Any) -> Any:
    """Return ``model(x)`` for a batch of a single array ``x``."""
    arrays = form_of(batch).arrays
    if len(arrays) != 1 or not callable(model):
        raise UserError(
            "predict cannot know how to call the model",
            why=f"a batch has {', '.join(arrays)}"
            if callable(model)
            else "the model is a dict of modules",
            fix='say it with a function: fn=lambda model, batch: model(batch["x"])',
        )
    return model(jax.tree.leaves(batch)[0])


def prediction_inputs(
    data: Any, function: Callable[[Any, Any], Any] | None, like: Any
) -> tuple[Data, Callable[[Any, Any], Any]]:
    """Return the data and the function of a prediction as the user gives them.

    Without a function, the model is applied to the only array.
    """
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return as_data({"batch": np.asarray(data)}), _OfArray(function) if function else apply_model
    expected = Expected(like=like, training=False)
    return as_data(data, expected=expected), function or apply_model


def predict(
    programs: Programs, state: TrainState, data: Data, function: Callable[[Any, Any], Any]
) -> Any:
    """Return ``function(model, batch)``, NumPy arrays of all samples, in the order of the data."""
    parts: list[Any] = []
    in_flight: deque[Any] = deque()
    with MemoryAdvice(programs.assembled).during(lambda: "predicting", trains=False):
        leaves = programs.assembled.step.leaf_values(state)
        for batch in EverySample(programs.assembled, data, in_order=True):
            run = programs.prediction(function, batch.arrays)
            in_flight.append(run(leaves, jax.tree.leaves(batch.arrays)))
            if len(in_flight) > MAX_IN_FLIGHT:
                parts.append(jax.device_get(in_flight.popleft()))
        parts.extend(jax.device_get(part) for part in in_flight)
    if not parts:
        raise no_data()
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
