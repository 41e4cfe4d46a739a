"""This machine as hardware to plan for: its memory, and what was measured once and kept."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.compiled.memory import memory_stats
from meshwright.errors import UserError
from meshwright.hardware import (
    MEASURED,
    BatchSizeRecommendation,
    Chip,
    Hardware,
    detect,
    find_chip,
    is_local,
    load_chips,
    parse_hardware,
    roofline_batch_sizes,
)
from meshwright.hardware.hardware_file import checked_row, plain_name
from meshwright.planner.devices.device_speed import DeviceTimer, fit_products
from meshwright.planner.devices.links import inside_links
from meshwright.runtime.activity import activity
from meshwright.runtime.host_machine import host_memory, user_cache
from meshwright.runtime.versions import package_versions
from meshwright.text.json_text import write_atomically
from meshwright.text.units import counted, human_bytes

SHARED = "devices of one host share its memory, so that more of them hold no more"
"""Why more virtual devices are no remedy."""


@dataclass(frozen=True)
class Capacity:
    """The memory of one device, where the figure comes from, and if more devices only divide it."""

    bytes: int
    source: str
    shared: bool = False

    def __str__(self) -> str:
        return f"{human_bytes(self.bytes)} ({self.source})"


def device_capacity(
    devices: Sequence[Any], host: Callable[[], Mapping[str, int | None]] = host_memory
) -> Capacity | None:
    """Return the memory of the smallest device, if known; virtual ones share the host's."""
    if not devices:
        return None
    if all(device.platform == "cpu" for device in devices):
        return _shared(len(devices), host())
    known = [limit for device in devices if (limit := _limit(device)) is not None]
    return min(known, key=lambda capacity: capacity.bytes) if len(known) == len(devices) else None


def known_hardware(devices: Sequence[Any]) -> Hardware | None:
    """Return the hardware of these devices from the table; None if it is not known.

    Virtual devices have a part of the memory of the host.
    """
    hardware = detect(devices)
    if hardware is None or hardware.chip.platform != "cpu":
        return hardware
    here = [device for device in devices if device.process_index == jax.process_index()]
    capacity = device_capacity(here)
    if capacity is None:
        return hardware
    return replace(hardware, chip=replace(hardware.chip, hbm_gb=capacity.bytes / 1e9))


def _limit(device: Any) -> Capacity | None:
    if limit := memory_stats(device).get("bytes_limit"):
        return Capacity(int(limit), f"what JAX may use of a {device.device_kind}")
    chip = find_chip(device.device_kind)
    if chip is None:
        return None
    return Capacity(int(chip.hbm_gb_per_device * 1e9), f"the memory of a {chip.name}")


def _shared(count: int, memory: Mapping[str, int | None]) -> Capacity | None:
    known = (memory.get("host_total_bytes"), memory.get("container_limit_bytes"))
    totals = [total for total in known if total]
    if not totals:
        return None
    whole = min(totals)
    text = f"the {human_bytes(whole)} of this host, shared by {counted(count, 'device')}"
    return Capacity(whole // count, text, shared=True)


FORMAT = 1
"""Changes when the same measurement would give other figures."""
SECONDS = 8.0
"""How long a measurement should take."""
_TIMINGS = 40
"""The time of a measurement is divided by this: there are a dozen timings, and most of it is
compiling."""
_COPIED_BYTES = {"cpu": 2**23}
_SUMMED_BYTES = {"cpu": 2**20}
_LARGE_BYTES = 2**27
_SMALL_BYTES = 1024
_HOST_SHARE = 0.9


def find_hardware(text: str | None) -> Hardware:
    """Return the hardware that a setting such as ``8xA100-40GB`` names.

    ``local`` measures this machine; None takes the figures of the table for the devices that are
    present, and measures them if they are not in it.
    """
    if text is not None and not is_local(text):
        return parse_hardware(text)
    known = detect() if text is None else None
    return known or measure_local()


def hardware_of(devices: Sequence[Any]) -> Hardware:
    """Return the hardware of these devices, from the table or measured."""
    return known_hardware(devices) or measure_local(devices)


def measure_local(
    devices: Sequence[Any] | None = None, *, refresh: bool = False, seconds: float = SECONDS
) -> Hardware:
    """Measure the devices of this process, or return what was measured before.

    Figures are of one device while all are busy: virtual devices share the cores of a host.
    """
    present = list(jax.local_devices() if devices is None else devices)
    kinds = sorted({device.device_kind for device in present})
    if len(kinds) != 1:
        raise UserError(
            f"the devices are not of one kind: {', '.join(kinds) or 'there are none'}",
            fix="pass devices= with those of one kind",
        )
    file = _cache_file(kinds[0], len(present))
    chip = None if refresh else _kept(file)
    if chip is None:
        with activity("measuring this machine") as show_progress:
            chip = _measure(present, seconds, show_progress)
        _keep(file, chip)
    return Hardware(chip=chip, count=len(present))


def _measure(devices: Sequence[Any], seconds: float, show_progress: Callable[[str], None]) -> Chip:
    timer = DeviceTimer(devices, seconds / _TIMINGS, time.perf_counter() + seconds / 2)
    base = _base(devices)
    show_progress("products")
    launch = timer.launch_seconds()
    timed = timer.products(base.peak_dtype, launch)
    rate, half = fit_products(timed)
    largest = timed[-1]
    shares = {
        f"{dtype}_share": timer.product(dtype, largest.size, launch).flops_per_s
        / largest.flops_per_s
        for dtype in ("float32", "bfloat16", "float16")
        if dtype != base.peak_dtype
    }
    show_progress("memory")
    copied = timer.copy_bytes_per_s(_COPIED_BYTES.get(base.platform, _LARGE_BYTES))
    usable = _usable_bytes(devices)
    chip = replace(
        base,
        **shares,
        **{f"{base.peak_dtype}_share": 1.0},
        product_half_size=half,
        launch_us=launch * 1e6,
        source=MEASURED,
    )
    on_chip = chip.devices_per_chip
    chip = _reached(chip, "peak_tflops", "product_share", rate * on_chip / 1e12)
    chip = _reached(chip, "hbm_tb_per_s", "hbm_share", copied * on_chip / 1e12)
    chip = _reached(chip, "hbm_gb", "memory_share", usable * on_chip / 1e9) if usable else chip
    if len(devices) > 1:
        show_progress("sums over devices")
        chip = _with_links(chip, len(devices), timer)
    if chip.name in load_chips():
        return chip
    return replace(chip, batch_sizes=roofline_batch_sizes(chip.peak_tflops, chip.hbm_tb_per_s))


def _base(devices: Sequence[Any]) -> Chip:
    """Return the chip of the table, or one that is typical of the platform."""
    kind = devices[0].device_kind
    known = find_chip(kind)
    if known is not None:
        return known
    # JAX calls GPUs of both vendors the same.
    platform = "rocm" if "AMD" in kind else devices[0].platform
    alike = {"gpu": "A100-80GB", "rocm": "MI300X", "tpu": "TPU-v5e"}.get(platform, "CPU")
    return replace(
        load_chips()[alike],
        name=kind,
        family=plain_name(kind),
        aliases=(),
        device_kinds=(kind,),
        devices_per_chip=1,
        fast_domain_chips=len(devices),
        topology="switch",
        links_per_chip=1,
        inter_node_gb_per_s=None,
        usd_per_hour=None,
    )


def _is_listed(chip: Chip) -> bool:
    """Whether the table has figures of this chip; those of CPUs are only orders of magnitude."""
    return chip.name in load_chips() and chip.platform != "cpu"


def _reached(chip: Chip, figure: str, share: str, measured: float) -> Chip:
    """Return the chip with what it reaches: as a share of the published figure, if there is one."""
    peak = getattr(chip, figure) if _is_listed(chip) else measured
    return replace(chip, **{figure: peak, share: min(measured / peak, 1.0)})


def _with_links(chip: Chip, count: int, timer: DeviceTimer) -> Chip:
    """Return the chip with the bandwidth and latency of sums over all devices."""
    nbytes = _SUMMED_BYTES.get(chip.platform, _LARGE_BYTES)
    small, large = timer.all_reduce_seconds(_SMALL_BYTES), timer.all_reduce_seconds(nbytes)
    sent = 2 * (count - 1) / count * nbytes / max(large - small, large / 2)
    inside = inside_links([count], chip)[0]
    if not _is_listed(chip):
        chip = replace(chip, link_gb_per_s=sent / 1e9 / inside.links * chip.devices_per_chip)
    peak = inside.links * chip.link_gb_per_s / chip.devices_per_chip * 1e9
    depth = inside.steps if chip.topology.startswith("torus") else math.ceil(math.log2(count))
    latency = small / (2 * depth)
    return replace(chip, link_share=min(sent / peak, 1.0), intra_node_latency_us=latency * 1e6)


def _usable_bytes(devices: Sequence[Any]) -> float | None:
    """Return what programs can use on one device: of its own memory, or its part of the host's."""
    if devices[0].platform == "cpu":
        capacity = device_capacity(devices)
        # The system and the program itself need some of it.
        return None if capacity is None else _HOST_SHARE * capacity.bytes
    return memory_stats(devices[0]).get("bytes_limit")


def _cache_file(kind: str, count: int) -> Path:
    versions = package_versions()
    cores = os.cpu_count() if kind == "cpu" else None
    key = [FORMAT, kind, count, cores, versions.get("jax"), versions.get("jaxlib")]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return user_cache("hardware") / f"{count}x{plain_name(kind)}-{digest}.json"


def _kept(file: Path) -> Chip | None:
    """Return the chip of an earlier measurement; None if there is none, or it is damaged."""
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        sizes = BatchSizeRecommendation(**row["batch_sizes"])
        return checked_row(Chip, {**row, "batch_sizes": sizes}, "the measurement", str(file))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(file: Path, chip: Chip) -> None:
    """Save a measurement; where it cannot be saved, it is repeated next time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(chip), indent=2))


def chip_yaml(chip: Chip, name: str) -> str:
    """Return a chip as an entry of a hardware file, to plan for many of what was measured."""
    import yaml

    left_out = ("name", "aliases", "device_kinds", "batch_sizes", "source")
    row = {key: value for key, value in asdict(chip).items() if key not in left_out}
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    return yaml.safe_dump({"chips": {name: rounded}}, sort_keys=False)
