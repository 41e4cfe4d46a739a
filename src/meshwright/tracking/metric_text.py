"""Metrics in words: the short names, units and widths that lines and progress bars show."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.units import human_bytes, human_count, human_seconds

HIDDEN = ("input_wait_share", "flops_per_second")
"""Metrics that are written to files but would crowd a line."""


def format_metrics(values: Mapping[str, float]) -> list[str]:
    """Return metrics as padded texts: the known ones first, then a task's own."""
    known = [
        say(values[name]).ljust(width) for name, (width, say) in _FORMATS.items() if name in values
    ]
    own = [
        f"{name} {value:.4g}".ljust(len(name) + 7)
        for name, value in values.items()
        if name not in _FORMATS and name not in HIDDEN
    ]
    return known + own


_FORMATS: dict[str, tuple[int, Callable[[float], str]]] = {
    "loss": (12, lambda v: f"loss {v:.4f}"),
    "learning_rate": (10, lambda v: f"lr {v:.2e}"),
    "grad_norm": (10, lambda v: f"grad {v:.3g}"),
    "samples_per_second": (15, lambda v: f"{human_count(v)} samples/s"),
    "tokens_per_second": (14, lambda v: f"{human_count(v)} tokens/s"),
    "step_seconds": (12, lambda v: f"{human_seconds(v)}/step"),
    "mfu": (9, lambda v: f"MFU {v:.1%}"),
    "memory_bytes": (9, human_bytes),
}
"""Known metrics in the order they are shown: the width of a column, and how the value is said."""
