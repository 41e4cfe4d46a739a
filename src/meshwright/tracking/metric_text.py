"""Metrics as text: short names, units and column widths for log lines and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.text.units import human_bytes, human_count, human_seconds

HIDDEN = ("input_wait_share", "flops_per_second")
"""Metrics that are only written to files, to keep lines short."""


def format_metrics(values: Mapping[str, float]) -> list[str]:
    """Return metrics as padded texts: known ones first, then those of the task."""
    known = [
        text(values[name]).ljust(width)
        for name, (width, text) in _FORMATS.items()
        if name in values
    ]
    own = [
        f"{name} {value:.4g}".ljust(len(name) + 7)
        for name, value in values.items()
        if name not in _FORMATS and name not in HIDDEN
    ]
    return known + own


_FORMATS: dict[str, tuple[int, Callable[[float], str]]] = {
    "loss": (12, lambda v: f"loss {v:.4f}"),
    "eval_samples": (12, lambda v: f"{v:,.0f} sample{'' if v == 1 else 's'}"),
    "learning_rate": (10, lambda v: f"lr {v:.2e}"),
    "grad_norm": (10, lambda v: f"grad {v:.3g}"),
    "samples_per_second": (15, lambda v: f"{human_count(v)} samples/s"),
    "tokens_per_second": (14, lambda v: f"{human_count(v)} tokens/s"),
    "step_seconds": (12, lambda v: f"{human_seconds(v)}/step"),
    "mfu": (9, lambda v: f"MFU {v:.1%}"),
    "memory_bytes": (9, human_bytes),
}
"""Known metrics in the order they are shown: column width, and the text of a value."""
