"""Comparing two runs leaf by leaf: the largest difference, and the first beyond the tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.proof.certificate import Comparison
from meshwright.proof.observed import Leaves

NULL_GRADIENT = 1e-12
"""A gradient whose norm is below this fraction of the global norm is rounding noise around zero."""


def global_norm(leaves: Leaves) -> float:
    """Return the norm of all leaves together, without those that are not finite."""
    # A leaf that is not finite fails its own comparison, and must not hide the others.
    return math.hypot(*filter(math.isfinite, (_norm(value) for value in leaves.values())))


def null_leaves(gradients: Leaves) -> list[str]:
    """Return the leaves whose true gradient is zero, such as key biases."""
    limit = NULL_GRADIENT * global_norm(gradients)
    return [path for path, value in gradients.items() if _norm(value) <= limit]


def compare_exactly(
    what: str, expected: Leaves, actual: Leaves, tolerance: float, *, nulls: Sequence[str] = ()
) -> Comparison:
    """Compare each leaf relative to its largest element; null leaves relative to the global norm.

    Integers, such as counters and random keys, must be identical: any difference is 1 or more.
    """
    norm = global_norm({path: v for path, v in expected.items() if _is_float(v)})
    differences: dict[str, float] = {}
    for path, value in expected.items():
        gap = _max_abs(_difference(value, actual[path]))
        scale = norm if path in nulls else _max_abs(value)
        differences[path] = gap / scale if _is_float(value) and scale else gap
    return _summarise(what, expected, actual, differences, tolerance)


def compare_roughly(
    what: str,
    expected: Leaves,
    actual: Leaves,
    tolerance: float,
    *,
    nulls: Sequence[str] = (),
    exact: Leaves | None = None,
) -> Comparison:
    """Compare the norm of each leaf's error with the leaf's norm plus its share of the global norm.

    Rounding errors are proportional to the terms of a sum, not to the sum: a leaf whose gradient
    nearly cancels has errors as large as those of other leaves. Null leaves, which cancel
    completely, are compared with the global norm.

    With ``exact``, the expected values are rounded too, and it is enough that a leaf is close to
    the exact values: one device may round worse than the mesh.
    """
    norm = global_norm(expected)
    elements = sum(value.size for value in expected.values())
    differences: dict[str, float] = {}
    for path, value in expected.items():
        share = 1.0 if path in nulls else math.sqrt(value.size / elements)
        scale = _norm(value) + norm * share
        error = _norm(_difference(value, actual[path]))
        if exact is not None:
            # `min` returns its first argument if that is NaN, so a NaN error is not hidden.
            error = min(error, _norm(_difference(exact[path], actual[path])))
        differences[path] = error / scale if scale else error
    return _summarise(what, expected, actual, differences, tolerance)


def compare_losses(
    expected: Sequence[float], actual: Sequence[float], tolerance: float
) -> Comparison:
    """Compare losses update by update, each relative to its expected value."""
    expected_by_update = {
        f"update {number}": np.asarray(loss) for number, loss in enumerate(expected)
    }
    actual_by_update = {f"update {number}": np.asarray(loss) for number, loss in enumerate(actual)}
    return compare_exactly("loss", expected_by_update, actual_by_update, tolerance)


def _summarise(
    what: str, expected: Leaves, actual: Leaves, differences: Mapping[str, float], tolerance: float
) -> Comparison:
    assert differences, f"{what}: nothing to compare"
    assert expected.keys() == actual.keys(), f"{what}: the leaves differ"
    # `not gap <= tolerance` is also true for NaN, `gap > tolerance` would not be.
    first = next((path for path, gap in differences.items() if not gap <= tolerance), None)
    worst = max(differences, key=lambda path: _nan_as_inf(differences[path]))
    return Comparison(
        what=what,
        equal=first is None,
        tolerance=tolerance,
        worst=worst,
        difference=_none_if_not_finite(differences[worst]),
        first_different=first,
        first_difference=None if first is None else _none_if_not_finite(differences[first]),
    )


def _nan_as_inf(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap


def _none_if_not_finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


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
