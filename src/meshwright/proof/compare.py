"""Comparing two runs leaf by leaf, and saying which leaf differs first and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.proof.certificate import Comparison
from meshwright.proof.observed import Leaves

NULL_GRADIENT = 1e-12
"""A gradient below this share of the global norm is rounding noise around a true zero."""


def global_norm(leaves: Leaves) -> float:
    """Return the norm of all leaves together; those that are not finite fail by themselves."""
    return math.hypot(*filter(math.isfinite, (_norm(value) for value in leaves.values())))


def null_leaves(gradients: Leaves) -> list[str]:
    """Return the leaves whose true gradient is zero, such as key biases."""
    limit = NULL_GRADIENT * global_norm(gradients)
    return [path for path, value in gradients.items() if _norm(value) <= limit]


def compare_exactly(
    what: str, expected: Leaves, found: Leaves, tolerance: float, *, nulls: Sequence[str] = ()
) -> Comparison:
    """Compare each leaf relative to its largest value; null leaves relative to the global norm.

    Whole numbers, such as counters and random keys, have to be the same: they differ by 1 or more.
    """
    norm = global_norm({path: v for path, v in expected.items() if _is_float(v)})
    differences: dict[str, float] = {}
    for path, value in expected.items():
        gap = _largest(_difference(value, found[path]))
        scale = norm if path in nulls else _largest(value)
        differences[path] = gap / scale if _is_float(value) and scale else gap
    return _summarise(what, expected, found, differences, tolerance)


def compare_roughly(
    what: str,
    expected: Leaves,
    found: Leaves,
    tolerance: float,
    *,
    nulls: Sequence[str] = (),
    exact: Leaves | None = None,
) -> Comparison:
    """Compare each leaf's error norm with its own norm plus its share of the global norm.

    Rounding errors follow the size of what is added up, not of the sum: a leaf whose gradient
    nearly cancels has errors like its neighbours'. Null leaves, which cancel altogether, are
    compared with the global norm.

    With ``exact``, what is expected is rounded itself, and a leaf may be as near to the exact
    values instead: where one device rounds worse than many, many are not wrong.
    """
    norm = global_norm(expected)
    elements = sum(value.size for value in expected.values())
    differences: dict[str, float] = {}
    for path, value in expected.items():
        share = 1.0 if path in nulls else math.sqrt(value.size / elements)
        scale = _norm(value) + norm * share
        error = _norm(_difference(value, found[path]))
        if exact is not None:
            # In this order, NaN stays NaN where it was expected, too.
            error = min(error, _norm(_difference(exact[path], found[path])))
        differences[path] = error / scale if scale else error
    return _summarise(what, expected, found, differences, tolerance)


def compare_losses(
    expected: Sequence[float], found: Sequence[float], tolerance: float
) -> Comparison:
    """Compare losses update by update, each relative to what it should be."""
    before = {f"update {number}": np.asarray(loss) for number, loss in enumerate(expected)}
    after = {f"update {number}": np.asarray(loss) for number, loss in enumerate(found)}
    return compare_exactly("loss", before, after, tolerance)


def _summarise(
    what: str, expected: Leaves, found: Leaves, differences: Mapping[str, float], tolerance: float
) -> Comparison:
    assert differences, f"{what}: nothing to compare"
    assert expected.keys() == found.keys(), f"{what}: other leaves were found"
    # NaN compares false with everything, so equality is what must be shown.
    first = next((path for path, gap in differences.items() if not gap <= tolerance), None)
    worst = max(differences, key=lambda path: _order(differences[path]))
    return Comparison(
        what=what,
        equal=first is None,
        tolerance=tolerance,
        worst=worst,
        difference=_finite(differences[worst]),
        first_different=first,
        first_difference=None if first is None else _finite(differences[first]),
    )


def _order(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


def _is_float(value: np.ndarray[Any, Any]) -> bool:
    return not np.issubdtype(value.dtype, np.integer) and value.dtype != bool


def _largest(value: np.ndarray[Any, Any]) -> float:
    return float(np.abs(_wide(value)).max(initial=0.0))


def _norm(value: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(_wide(value).ravel()))


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    with np.errstate(invalid="ignore"):
        return _wide(a) - _wide(b)


def _wide(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64)
