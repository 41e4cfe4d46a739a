"""HardwareType: the kind of device a program runs on, and the batch sizes that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Self

from meshwright.hardware import BatchSizeRecommendation, detect, load_chips, unknown_batch_sizes


class HardwareType(Enum):
    """Kinds of device; memory variants of one chip share a member."""

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
    def detect(cls, devices: Sequence[Any] | None = None) -> Self:
        """Return what these devices are (all of JAX's by default); UNKNOWN is never guessed at."""
        hardware = detect(devices)
        return cls("unknown" if hardware is None else hardware.chip.family)

    @property
    def batch_sizes(self) -> BatchSizeRecommendation:
        """The batch sizes that suit this kind of device."""
        for chip in load_chips().values():
            if chip.family == self.value:
                return chip.batch_sizes
        return unknown_batch_sizes()
