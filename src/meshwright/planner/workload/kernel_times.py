"""How long scheduled kernels take on a chip: by their products, and by the bytes they move."""

from __future__ import annotations

import numpy as np

from meshwright.hardware import Chip
from meshwright.planner.workload.work_table import Works
from meshwright.program.kernels.fused_attention import PLANNED, PLANNED_GRADIENT

_ATTENTION_SHARE = {PLANNED: 0.62, PLANNED_GRADIENT: 0.475}
"""Share of a chip's attainable product rate that attention kernels reach, measured."""

_ALONE = 1.07
"""Rate of a product's arithmetic relative to a large product with its memory traffic, fitted."""

_OVERLAP = 0.58
"""The part of a product's memory traffic that its arithmetic does not hide, fitted."""

_READ_ONCE = 0.55
"""The part of what kernels read and write that is left when compilers join those which read the
same arrays, fitted."""

_SUMS = 1.7
"""Time of kernels that add up rows, such as those of a bias, relative to their memory traffic:
few of a GPU's processors work on a sum, and they add it in two steps. Fitted."""

_CONVOLUTION_SHARE = 0.55
"""Rate of convolutions relative to that of products, fitted to the kernels of ResNet-50."""

_ITERATION = {"cuda": 170e-6, "rocm": 170e-6}
"""Seconds of one iteration of a loop besides its kernels, by platform: the host asks whether it
goes on, and nothing overlaps. Fitted."""


def seconds_of(works: Works, chip: Chip, product_rate: float) -> np.ndarray:
    """Return the seconds of one run of each kernel.

    Args:
        works: what they do.
        chip: where.
        product_rate: operations per second that large products reach.
    """
    memory = works.nbytes / (chip.hbm_tb_per_s_per_device * 1e12 * chip.hbm_share)
    seconds = np.where(works.kind == "sum", _SUMS, _READ_ONCE) * memory
    for kind, share in (("product", 1.0), ("convolution", _CONVOLUTION_SHARE)):
        compute = works.flops / (product_rate * _ALONE * share)
        products = np.maximum(compute, memory) + _OVERLAP * np.minimum(compute, memory)
        seconds = np.where(works.kind == kind, products, seconds)
    for kind, share in _ATTENTION_SHARE.items():
        attention = np.maximum(works.flops / (product_rate * share), memory)
        seconds = np.where(works.kind == kind, attention, seconds)
    seconds += chip.launch_us * 1e-6
    return np.where(works.kind == "loop", _ITERATION.get(chip.platform, 0.0), seconds)
