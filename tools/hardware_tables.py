"""The tables of docs/hardware.md: interconnects, bytes per parameter, sizes and scaling.

    python tools/hardware_tables.py [CHIP [WIDTH]]

prints what each interconnect is good for, for chips of this name and a transformer of this width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from meshwright.errors import UserError, did_you_mean
from meshwright.hardware import Chip, Hardware, chip_by_name, load_chips, load_links
from meshwright.mesh.axes import BATCH_AXES
from meshwright.planner.devices.links import axis_links, collective_seconds
from meshwright.text.units import human_count

Compute = Literal["float32", "bfloat16"]
MASTER = GRADIENT = 4
"""Bytes of a weight and of its gradient, which are always float32."""
STATE: Mapping[str, int] = {
    "sgd": 0,
    "sgd with momentum": 4,
    "adafactor": 0,
    "lion": 4,
    "muon": 4,
    "adamw": 8,
}
"""Bytes of optimizer state per parameter. Adafactor has a row and a column per matrix; Muon keeps
more for parameters that are no matrices."""
BACKWARD = 2 / 3
"""The share of computing that is the backward pass, during which gradients can be reduced."""
_BLOCK_FLOPS = 72
"""FLOPs of a transformer block per token and squared width, forward and backward: it has 12 weights
per squared width, each used for 6."""
_FAST_LINKS = {
    "NVLink": ("V100-32GB", "A100-80GB", "H100", "B200"),
    "Infinity Fabric": ("MI300X",),
    "ICI, one axis": ("TPU-v5e", "TPU-v5p"),
}
_BUSY_TOKENS = 32_768
"""Tokens per device and step that are usual in large runs."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter while training.

    Attributes:
        optimizer: the optimizer.
        compute: the type that the model computes in.
        weights: the float32 weights.
        copy: the 16-bit copy that products read.
        gradients: their gradients.
        state: the state of the optimizer.
        total: all of them.
    """

    optimizer: str
    compute: str
    weights: int
    copy: int
    gradients: int
    state: int
    total: int


@dataclass(frozen=True)
class Interconnect:
    """What a link is good for.

    Attributes:
        link: its name.
        gb_per_s: its bandwidth per chip in one direction.
        tensor: communication of 8-way tensor parallelism, in multiples of computing.
        data_tokens: tokens per device and step at which data parallelism, or FSDP in 16 bits,
            communicates for as long as it computes.
        pipe: communication of a pipeline stage of 8 blocks, in multiples of computing.
        axes: the mesh axes it carries, along which a device communicates for no longer than it
            computes, with 32k tokens per device and step.
    """

    link: str
    gb_per_s: float
    tensor: float
    data_tokens: int
    pipe: float
    axes: str


@dataclass(frozen=True)
class LargestModel:
    """The most parameters that fit.

    Attributes:
        hardware: the devices.
        replicated: parameters if each device has the whole state, as in data parallelism.
        sharded: parameters if the state is sharded over all devices, as in FSDP.
    """

    hardware: str
    replicated: float
    sharded: float


@dataclass(frozen=True)
class Scaling:
    """How data parallelism scales.

    Attributes:
        devices: how many devices.
        compute_s: seconds in which a device computes its part.
        all_reduce_s: seconds in which gradients are reduced.
        efficiency: speed per device relative to one device, if they are reduced afterwards.
        overlapped: the same if they are reduced during the backward pass.
    """

    devices: int
    compute_s: float
    all_reduce_s: float
    efficiency: float
    overlapped: float


def parameter_bytes(optimizer: str = "adamw", compute: Compute = "bfloat16") -> ParameterBytes:
    """Return the bytes per parameter, without activations."""
    if optimizer not in STATE:
        raise UserError(
            f"there is no figure for the optimizer `{optimizer}`",
            why=f"known are {', '.join(STATE)}",
            fix=did_you_mean(optimizer, STATE),
        )
    copy = 0 if compute == "float32" else 2
    state = STATE[optimizer]
    return ParameterBytes(
        optimizer, compute, MASTER, copy, GRADIENT, state, MASTER + copy + GRADIENT + state
    )


def parameter_bytes_rows() -> list[ParameterBytes]:
    """Return the bytes per parameter of each optimizer, in both types."""
    return [parameter_bytes(name, compute) for name in STATE for compute in ("float32", "bfloat16")]


def largest_model(
    hardware: Hardware, optimizer: str = "adamw", *, activations: float = 0.25
) -> LargestModel:
    """Return the most parameters that fit, computing in bfloat16.

    Sharded weights are copied block by block, so that copies take hardly any memory; replicated
    ones are copied all at once.

    Args:
        hardware: the devices.
        optimizer: the optimizer.
        activations: the share of the memory that is left for activations.
    """
    room = hardware.chip.usable_gb_per_device * 1e9 * (1 - activations)
    each = parameter_bytes(optimizer)
    return LargestModel(
        hardware=str(hardware),
        replicated=room / each.total,
        sharded=hardware.count * room / (each.total - each.copy),
    )


def scaling_efficiency(compute_s: float, all_reduce_s: float, *, overlap: bool) -> float:
    """Return the speed per device, relative to one that does not communicate.

    Args:
        compute_s: seconds of computing per step.
        all_reduce_s: seconds of reducing gradients.
        overlap: whether they are reduced during the backward pass: only what lasts longer than it
            costs time. Without it, all of it does.
    """
    hidden = BACKWARD * compute_s if overlap else 0.0
    return compute_s / (compute_s + max(all_reduce_s - hidden, 0.0))


def data_parallel_rows(
    chip: str, parameters: float, tokens_per_device: int, counts: Sequence[int]
) -> list[Scaling]:
    """Return how data parallelism scales for a model of so many parameters.

    A token costs 6 FLOPs per parameter, and gradients are reduced in float32.

    Args:
        chip: the name of the chip.
        parameters: of the model.
        tokens_per_device: per step.
        counts: numbers of devices.
    """
    found = chip_by_name(chip)
    compute = 6 * parameters * tokens_per_device / _reached_flops(found)
    domain = found.devices_per_domain or max(counts)
    rows: list[Scaling] = []
    for count in counts:
        hardware = Hardware(chip=found, count=count, nodes=-(-count // domain))
        link = axis_links(hardware, {"data": count}).get("data")
        reduced = (
            collective_seconds("all-reduce", GRADIENT * parameters, link, hardware) if link else 0.0
        )
        kept = [scaling_efficiency(compute, reduced, overlap=how) for how in (False, True)]
        rows.append(Scaling(count, compute, reduced, *kept))
    return rows


def interconnect_rows(chip: str = "H100", width: int = 4096) -> list[Interconnect]:
    """Return what each interconnect is good for.

    Fast links are those of the chips named with them; the others join chips of the given kind.

    Args:
        chip: the chip that links of no chip join.
        width: of the transformer.
    """
    rows = [
        _interconnect(f"{kind} ({name})", _own(found), found, width)
        for kind, names in _FAST_LINKS.items()
        for name in names
        for found in (load_chips()[name],)
    ]
    joined = chip_by_name(chip)
    rows += [
        _interconnect(name, link.gb_per_s, joined, width) for name, link in load_links().items()
    ]
    return sorted(rows, key=lambda row: -row.gb_per_s)


def markdown_table(rows: Sequence[Any]) -> str:
    """Return rows as a Markdown table, with the names of their fields as its head."""
    names = [field.name for field in fields(rows[0])]
    head = " | ".join(name.replace("_", " ") for name in names)
    rule = " | ".join(
        "---" if isinstance(getattr(rows[0], name), str) else "---:" for name in names
    )
    cells = [" | ".join(_cell(getattr(row, name)) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in (head, rule, *cells))


def _interconnect(name: str, gb_per_s: float, chip: Chip, width: int) -> Interconnect:
    rate, sent = _reached_flops(chip), gb_per_s * 1e9 * chip.link_share
    devices = blocks = 8
    # Two all-reduces of the activations in each direction, of two bytes each.
    exchanged = 4 * 2 * (devices - 1) / devices * 2 * width / sent
    tensor = exchanged / (_BLOCK_FLOPS * width**2 / devices / rate)
    # Eight bytes per parameter: an all-reduce of float32 gradients sends them twice; FSDP gathers
    # two bytes twice and scatters four.
    tokens = 2 * GRADIENT / sent / (6 / rate)
    # The activations forward and their gradients backward, of two bytes each.
    pipe = 2 * 2 * width / sent / (blocks * _BLOCK_FLOPS * width**2 / rate)
    axes = ["tensor"] if tensor <= 1 else []
    axes += reversed(BATCH_AXES) if tokens <= _BUSY_TOKENS else []
    axes += ["pipe"] if pipe <= 1 else []
    return Interconnect(name, gb_per_s, tensor, round(tokens), pipe, ", ".join(axes) or "none")


def _own(chip: Chip) -> float:
    """Return what a collective over one axis has of a chip's fast links; of a torus, one ring."""
    links = 2 if chip.topology.startswith("torus") else chip.links_per_chip
    return links * chip.link_gb_per_s


def _reached_flops(chip: Chip) -> float:
    return chip.peak_of(chip.peak_dtype) * chip.product_share


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else human_count(value).replace("G", "B")
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    given = [*sys.argv[1:], *("H100", "4096")[len(sys.argv) - 1 :]]
    print(markdown_table(interconnect_rows(given[0], int(given[1]))))
