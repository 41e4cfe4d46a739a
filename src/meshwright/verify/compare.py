"""Comparing two runs leaf by leaf, and saying which leaf differs first and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.verify.certificate import Comparison

Leaves = Mapping[str, np.ndarray[Any, Any]]

NULL_GRADIENT = 1e-12
"""A gradient below this share of the global norm is rounding noise around a true zero."""


def global_norm(leaves: Leaves) -> float:
    """Return the norm of all leaves together."""
    return float(np.sqrt(sum(float(np.sum(np.square(_wide(v)))) for v in leaves.values())))


def null_leaves(gradients: Leaves) -> list[str]:
    """Return the leaves whose true gradient is zero, such as key biases."""
    limit = NULL_GRADIENT * global_norm(gradients)
    return [path for path, value in gradients.items() if np.linalg.norm(_wide(value)) <= limit]


def compare_exactly(
    what: str, expected: Leaves, found: Leaves, nulls: Sequence[str], tolerance: float
) -> Comparison:
    """Compare each leaf relative to its largest value; null leaves relative to the global norm."""
    norm = global_norm(expected)
    differences: dict[str, float] = {}
    for path, value in expected.items():
        largest = norm if path in nulls else float(np.abs(_wide(value)).max(initial=0.0))
        gap = _gap(value, found[path])
        differences[path] = gap / largest if largest else gap
    return _summarise(what, differences, tolerance)


def compare_roughly(what: str, expected: Leaves, found: Leaves, tolerance: float) -> Comparison:
    """Compare each leaf's error norm with its own norm plus its share of the global norm.

    Rounding errors follow the size of what is added up, not of the sum: a leaf whose gradient
    nearly cancels has errors like its neighbours'.
    """
    norm = global_norm(expected)
    elements = sum(value.size for value in expected.values())
    differences: dict[str, float] = {}
    for path, value in expected.items():
        scale = float(np.linalg.norm(_wide(value))) + norm * float(np.sqrt(value.size / elements))
        error = float(np.linalg.norm(_wide(value) - _wide(found[path])))
        differences[path] = error / scale if scale else error
    return _summarise(what, differences, tolerance)


def compare_losses(
    expected: Sequence[float], found: Sequence[float], tolerance: float
) -> Comparison:
    """Compare losses update by update."""
    differences = {
        f"update {n}": abs(a - b) / max(abs(a), 1e-30)
        for n, (a, b) in enumerate(zip(expected, found, strict=True))
    }
    return _summarise("loss", differences, tolerance)


def _summarise(what: str, differences: Mapping[str, float], tolerance: float) -> Comparison:
    # NaN compares false with everything, so equality is what must be shown.
    first = next((path for path, gap in differences.items() if not gap <= tolerance), None)
    worst = max(differences, key=lambda path: _order(differences[path]))
    return Comparison(
        what=what,
        equal=first is None,
        tolerance=tolerance,
        worst=worst,
        difference=differences[worst],
        first_different=first,
        first_difference=None if first is None else differences[first],
    )


def _order(gap: float) -> float:
    return float("inf") if np.isnan(gap) else gap


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.abs(_wide(a) - _wide(b)).max(initial=0.0))


def _wide(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(value, np.float64)
