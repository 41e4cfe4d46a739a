"""HardwareType: kinds of devices, and recommended batch sizes for them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Self

from meshwright.hardware import BatchSizeRecommendation, detect, load_chips, unknown_batch_sizes
from meshwright.mesh.build import Device


class HardwareType(Enum):
    """Kinds of devices; variants of a chip with different memory share a member."""

    V100 = "v100"
    A100 = "a100"
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"
    GB200 = "gb200"
    MI300X = "mi300x"
    TPU_V4 = "tpu_v4"
    TPU_V5E = "tpu_v5e"
    TPU_V5P = "tpu_v5p"
    TPU_V6E = "tpu_v6e"
    TPU_7X = "tpu_7x"
    CPU = "cpu"
    UNKNOWN = "unknown"

    @classmethod
    def detect(cls, devices: Sequence[Device] | None = None) -> Self:
        """Return the kind of these devices (all of JAX's by default); UNKNOWN if in doubt."""
        hardware = detect(devices)
        family = "unknown" if hardware is None else hardware.chip.family
        # Users may add chips of their own.
        return cls(family if family in {kind.value for kind in cls} else "unknown")

    @property
    def batch_sizes(self) -> BatchSizeRecommendation:
        """Recommended batch sizes for this kind of device."""
        for chip in load_chips().values():
            if chip.family == self.value:
                return chip.batch_sizes
        return unknown_batch_sizes()
