"""What is observed of a run, and comparing two runs leaf by leaf: gaps, tolerances, verdicts."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.proof.certificate import Comparison
from meshwright.text.json_text import finite
from meshwright.trees import key_data

Leaves = Mapping[str, np.ndarray[Any, Any]]
"""Values on the host by canonical path."""

Masks = Mapping[str, np.ndarray[Any, Any]]
"""By path, which elements are selected; none of a path that is missing."""


@dataclass(frozen=True)
class ObservedRun:
    """Losses, gradients and final values of a training run.

    Gradients are those of the first step, before clipping; parameters and state those after the
    last, or as one call of the loss leaves them. Metrics include the norm of the gradients.
    ``withheld`` elements had rounding noise for a gradient in every step, and the optimizer got
    zeros for them; ``written`` are paths of parameters that the model writes to in its call.
    """

    losses: list[float]
    gradients: Leaves
    parameters: Leaves
    state: Leaves
    withheld: Masks = field(default_factory=dict[str, np.ndarray[Any, Any]])
    metrics: Sequence[Mapping[str, float]] = ()
    written: frozenset[str] = frozenset()

    def is_finite(self) -> bool:
        """Whether every loss and gradient is."""
        return bool(np.isfinite(self.losses).all()) and all_finite(self.gradients)

    def kept(self, written: Iterable[str]) -> Leaves:
        """Return the state, and the parameters that some run has written to."""
        return {**self.state, **{path: self.parameters[path] for path in sorted(written)}}


def fetch(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Copy values to the host; random keys become the integers they consist of."""
    words = {path: key_data(value) for path, value in values.items()}
    return {path: np.asarray(value) for path, value in jax.device_get(words).items()}


def all_finite(leaves: Leaves) -> bool:
    """Whether no value is infinite or not a number."""
    return all(bool(np.isfinite(_to_float64(value)).all()) for value in leaves.values())


NULL_GRADIENT = 1e-12
"""A gradient whose size is below this fraction of the global norm is rounding noise around zero."""

UNJUDGEABLE = 0.1
"""A value that rounding alone changes by this much says nothing about a mesh."""

Gaps = Mapping[str, float]
"""By leaf, or by step, how far two values are apart, relative to their size."""


def global_norm(leaves: Leaves) -> float:
    """Return the norm of all leaves together, without those that are not finite."""
    # A leaf that is not finite fails its own comparison, and must not hide the others.
    return math.hypot(*filter(math.isfinite, (_norm(value) for value in leaves.values())))


def null_leaves(gradients: Leaves) -> list[str]:
    """Return the leaves whose true gradient is zero, such as key biases."""
    limit = NULL_GRADIENT * global_norm(gradients)
    return [path for path, value in gradients.items() if _norm(value) <= limit]


def exact_gaps(expected: Leaves, actual: Leaves, *, nulls: Collection[str] = ()) -> Gaps:
    """Return each leaf's largest error relative to its largest element.

    Null leaves are compared with the global norm. Integers, such as counters and random keys, must
    be identical: any difference is 1 or more.
    """
    assert expected.keys() == actual.keys(), "the leaves differ"
    norm = global_norm({path: v for path, v in expected.items() if _is_float(v)})
    gaps: dict[str, float] = {}
    for path, value in expected.items():
        gap = _max_abs(_difference(value, actual[path]))
        scale = norm if path in nulls else _max_abs(value)
        gaps[path] = gap / scale if _is_float(value) and scale else gap
    return gaps


def rough_gaps(
    expected: Leaves, actual: Leaves, *, exact: Leaves | None = None, nulls: Collection[str] = ()
) -> Gaps:
    """Return the norm of each leaf's error relative to its norm plus its share of the global norm.

    Rounding errors are proportional to the terms of a sum, not to the sum: a leaf whose gradient
    nearly cancels has errors as large as those of other leaves. Null leaves, which cancel
    completely, are compared with the global norm. Integers must be identical.

    With ``exact``, the expected values are rounded too, and it is enough that a leaf is close to
    the exact values: one device may round worse than the mesh.
    """
    assert expected.keys() == actual.keys(), "the leaves differ"
    floats = {path: value for path, value in expected.items() if _is_float(value)}
    norm = global_norm(floats)
    elements = sum(value.size for value in floats.values())
    gaps: dict[str, float] = {}
    for path, value in expected.items():
        if path not in floats:
            gaps[path] = _max_abs(_difference(value, actual[path]))
            continue
        share = 1.0 if path in nulls else math.sqrt(value.size / max(elements, 1))
        scale = _norm(value) + norm * share
        error = _norm(_difference(value, actual[path]))
        if exact is not None:
            # `min` returns its first argument if that is NaN, so a NaN error is not hidden.
            error = min(error, _norm(_difference(exact[path], actual[path])))
        gaps[path] = error / scale if scale else error
    return gaps


def loss_gaps(expected: Sequence[float], actual: Sequence[float]) -> Gaps:
    """Return the error of each step's loss, relative to its expected value."""
    return exact_gaps(_by_step(expected), _by_step(actual))


def metric_gaps(
    expected: Sequence[Mapping[str, float]], actual: Sequence[Mapping[str, float]]
) -> Gaps:
    """Return the error of each metric, relative to its largest value in any step.

    A metric may be undefined for a batch, such as the mean of nothing: where both are not finite,
    they are equal.
    """
    if not expected:
        return {}
    names = list(expected[0])
    runs = [
        np.array([[step[name] for step in run] for name in names]) for run in (expected, actual)
    ]
    undefined = ~np.isfinite(runs[0]) & ~np.isfinite(runs[1])
    rows = [dict(zip(names, np.where(undefined, 0.0, run), strict=True)) for run in runs]
    return exact_gaps(*rows)


def where_defined(expected: Leaves, actual: Leaves) -> tuple[Leaves, Leaves]:
    """Return two states, with zeros where both have the same infinity or are not a number.

    A state may hold infinity until its first minimum, unlike losses, gradients and parameters.
    """
    pairs = dict[str, tuple[Any, Any]]()
    for path, value in expected.items():
        a, b = pairs[path] = value, actual[path]
        if _is_float(value):
            same = ~np.isfinite(_to_float64(a)) & ((a == b) | ((a != a) & (b != b)))
            pairs[path] = np.where(same, 0, a), np.where(same, 0, b)
    return {p: a for p, (a, _) in pairs.items()}, {p: b for p, (_, b) in pairs.items()}


def _by_step(losses: Sequence[float]) -> Leaves:
    return {f"step {number}": np.asarray(loss) for number, loss in enumerate(losses, start=1)}


def worst_of(parts: Iterable[Gaps]) -> Gaps:
    """Return the largest gap of each leaf."""
    worst: dict[str, float] = {}
    for gaps in parts:
        for path, gap in gaps.items():
            if path not in worst or not gap <= worst[path]:
                worst[path] = gap
    return worst


def judge(
    what: str,
    gaps: Gaps,
    tolerance: float,
    *,
    how: str = "",
    allowed: Callable[[], Gaps] | None = None,
) -> Comparison:
    """Return the comparison of gaps with a tolerance.

    If a gap is beyond it, ``allowed`` is called. It measures, for this model and this batch, how
    much rounding alone can change each leaf: the tolerance of a leaf is at least that. A leaf that
    rounding alone changes by more than `UNJUDGEABLE` is not judged.
    """
    assert gaps, f"{what}: nothing to compare"
    tolerances = dict.fromkeys(gaps, tolerance)
    measured = False
    # `not gap <= tolerance` is also true for NaN, `gap > tolerance` would not be.
    if allowed is not None and any(not gap <= tolerance < math.inf for gap in gaps.values()):
        for path, gap in allowed().items():
            measured = measured or gap > tolerance
            tolerances[path] = max(tolerance, gap)
    unjudged = [
        path
        for path, gap in gaps.items()
        if math.isfinite(gap) and tolerances[path] > max(UNJUDGEABLE, tolerance)
    ]
    judged = {path: gap for path, gap in gaps.items() if path not in unjudged}
    first = next((path for path, gap in judged.items() if not gap <= tolerances[path]), None)
    known = {path: math.inf if math.isnan(gaps[path]) else gaps[path] for path in judged or gaps}
    worst = max(known, key=lambda path: known[path] / (tolerances[path] or 1))
    named = worst if first is None else first
    return Comparison(
        what=what,
        how=how,
        equal=first is None,
        tolerance=tolerances[named],
        measured=measured,
        worst=worst,
        difference=finite(gaps[worst]),
        first_different=first,
        first_difference=None if first is None else finite(gaps[first]),
        not_judged=unjudged,
    )


def _is_float(value: np.ndarray[Any, Any]) -> bool:
    return not np.issubdtype(value.dtype, np.integer) and value.dtype != bool


def _max_abs(value: np.ndarray[Any, Any]) -> float:
    return float(np.abs(_to_float64(value)).max(initial=0.0))


def _norm(value: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(_to_float64(value).ravel()))


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    with np.errstate(invalid="ignore"):
        return _to_float64(a) - _to_float64(b)


def _to_float64(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64)
