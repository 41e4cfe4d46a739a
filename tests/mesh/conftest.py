"""Machines that are not here, described by devices that only have a place."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class FakeDevice:
    """As much of a JAX device as building and drawing a mesh look at."""

    id: int
    process_index: int = 0
    device_kind: str = "NVIDIA H200"
    platform: str = "gpu"
    slice_index: int | None = None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


@pytest.fixture(scope="session")
def cluster() -> Callable[..., list[FakeDevice]]:
    """Makes ``processes`` × ``each`` devices with consecutive ids."""

    def make(processes: int, each: int, **more: object) -> list[FakeDevice]:
        return [FakeDevice(i, i // each, **more) for i in range(processes * each)]

    return make


@pytest.fixture(scope="session")
def tpu_slices() -> Callable[[int], list[FakeDevice]]:
    """Makes slices of four TPU chips in a 2 × 2 torus, one process each."""

    def make(slices: int) -> list[FakeDevice]:
        return [
            FakeDevice(4 * s + c, s, "TPU v4", "tpu", slice_index=s, coords=(c % 2, c // 2, 0))
            for s in range(slices)
            for c in range(4)
        ]

    return make
