"""Chips and links: their figures, detecting devices, and parsing ``8xA100-40GB``."""

from meshwright.hardware.chips import MEASURED, BatchSizeRecommendation, Chip, Cores, Hardware, Link
from meshwright.hardware.table import (
    LOCAL,
    chip_by_name,
    detect,
    find_chip,
    is_local,
    load_chips,
    load_links,
    parse_hardware,
    roofline_batch_sizes,
    unknown_batch_sizes,
)

MEMORY_SHARE = 0.9
"""The share of a device's memory that plans may use, and that JAX allocates.

The rest is for what JAX and the driver keep, and for the error of estimates.
"""

__all__ = [
    "LOCAL", "MEASURED", "MEMORY_SHARE", "BatchSizeRecommendation", "Chip", "Cores", "Hardware",
    "Link", "chip_by_name", "detect", "find_chip", "is_local", "load_chips", "load_links",
    "parse_hardware", "roofline_batch_sizes", "unknown_batch_sizes"
]  # fmt: skip
