"""Chips, links, and the hardware that plans are made for: what is known of each."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

MEASURED = "measured on this machine"
"""The source of figures that were measured."""

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Topology = Literal["switch", "point_to_point", "torus_2d", "torus_3d", "shared_memory"]
Platform = Literal["cuda", "rocm", "tpu", "cpu"]


@dataclass(frozen=True)
class BatchSizeRecommendation:
    """How many rows a matrix product needs to keep a device busy.

    A row is a sample, or a token in a language model.

    Attributes:
        min_batch_size: with fewer rows the device is mostly idle.
        optimal_batch_size: a round size at which compute, not memory, is the limit.
        critical_batch_size: where memory and compute take equally long (the roofline's knee).
        max_memory_batch_size: the largest size that fits in memory; None if unknown, since it
            depends on the model.
        notes: the origin of the figures.
    """

    min_batch_size: int
    optimal_batch_size: int
    critical_batch_size: int
    max_memory_batch_size: int | None = None
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What compilers need to know of an NVIDIA GPU; docs/hardware.md explains the figures."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    count: Count
    threads: Count
    shared_kib: Count
    clock_ghz: Amount
    l2_mib: Count


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip; figures are for the whole chip, as ``docs/hardware.md`` explains them.

    The memory variants of a chip share a family, such as ``a100``. ``source`` says where the
    figures come from: ``table``, a file, or a measurement.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    family: str
    platform: Platform
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    devices_per_chip: Count = 1
    peak_tflops: Amount
    peak_dtype: str = "bfloat16"
    float32_share: Amount = 1.0
    bfloat16_share: Amount = 1.0
    float16_share: Amount = 1.0
    product_share: Share = 1.0
    product_half_size: NotNegative = 0.0
    hbm_gb: Amount
    memory_share: Share = 1.0
    hbm_tb_per_s: Amount
    hbm_share: Share = 1.0
    launch_us: NotNegative = 0.0
    links_per_chip: Count
    link_gb_per_s: Amount
    topology: Topology
    fast_domain_chips: Count | None = None
    inter_node_gb_per_s: Amount | None = None
    link_share: Share = 1.0
    intra_node_latency_us: NotNegative = 0.0
    inter_node_latency_us: NotNegative = 0.0
    usd_per_hour: NotNegative | None = None
    cores: Cores | None = None
    batch_sizes: BatchSizeRecommendation
    source: str = "table"

    @property
    def measured(self) -> bool:
        """Whether the figures were measured here."""
        return self.source == MEASURED

    @property
    def intra_node_gb_per_s(self) -> float:
        """All fast links of the chip together, one direction, 1e9 bytes/s."""
        return self.links_per_chip * self.link_gb_per_s

    @property
    def tflops_per_device(self) -> float:
        """Peak of one JAX device, 1e12 FLOP/s."""
        return self.peak_tflops / self.devices_per_chip

    @property
    def hbm_gb_per_device(self) -> float:
        """Memory of one JAX device, 1e9 bytes."""
        return self.hbm_gb / self.devices_per_chip

    @property
    def hbm_tb_per_s_per_device(self) -> float:
        """Memory bandwidth of one JAX device, 1e12 bytes/s."""
        return self.hbm_tb_per_s / self.devices_per_chip

    @property
    def usable_gb_per_device(self) -> float:
        """Memory of one JAX device that programs can use, 1e9 bytes."""
        return self.hbm_gb_per_device * self.memory_share

    @property
    def usd_per_device_hour(self) -> float | None:
        """Price of one JAX device; None if it is not given."""
        return None if self.usd_per_hour is None else self.usd_per_hour / self.devices_per_chip

    def peak_of(self, dtype: str) -> float:
        """Return the peak of one JAX device for products of a dtype, FLOP/s."""
        return self.tflops_per_device * 1e12 * getattr(self, f"{dtype}_share", 1.0)

    def product_flops_per_s(
        self, rows: float, columns: float, inner: float, dtype: str = "bfloat16"
    ) -> float:
        """Return what one JAX device reaches in a product of (rows × inner) and (inner × columns).

        A dim of length d reaches d / (d + product_half_size) of the rate of a large product: short
        dims leave parts of the matrix units idle. Memory and launch time come on top.
        """
        filled = math.prod(d / (d + self.product_half_size) for d in (rows, columns, inner))
        return self.peak_of(dtype) * self.product_share * filled

    @property
    def devices_per_domain(self) -> int | None:
        """The most JAX devices that fast links connect; None if there is no limit."""
        return self.fast_domain_chips and self.fast_domain_chips * self.devices_per_chip


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link that does not belong to one chip; ``gb_per_s`` is one direction, 1e9 bytes/s."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    gb_per_s: Amount


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A number of equal JAX devices in all nodes (domains of fast links) together."""

    chip: Chip
    count: int
    nodes: int = 1

    @property
    def devices_per_node(self) -> int:
        """JAX devices in one node."""
        return self.count // self.nodes

    def __str__(self) -> str:
        if self.nodes == 1:
            return f"{self.count}x{self.chip.name}"
        return f"{self.nodes}x{self.devices_per_node}x{self.chip.name}"
