"""The table of chips and links: reading it, detecting devices, and parsing ``8xA100-40GB``."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from meshwright.errors import UserError
from meshwright.hardware.chips import BatchSizeRecommendation, Chip, Hardware, Link
from meshwright.hardware.hardware_file import (
    VARIABLE,
    checked_row,
    hardware_file,
    merge_chips,
    plain_name,
    read_hardware_file,
)

LOCAL = "local"
"""The hardware text that stands for this machine, measured."""

_ROWS = 64
"""Batch sizes are rounded to multiples of this many rows, which tile well on every chip."""


def load_chips() -> Mapping[str, Chip]:
    """Return every known chip by name: those of the built-in table and of the user's own file."""
    return _chips(*_own_file())


def load_links() -> Mapping[str, Link]:
    """Return the known links between chips and machines by name, the user's own included."""
    return _links(*_own_file())


def unknown_batch_sizes() -> BatchSizeRecommendation:
    """Return the cautious recommendation for a device that is not in the table."""
    return _batch_sizes(_table()["unknown_batch_sizes"], "for devices that are not in the table")


def roofline_batch_sizes(peak_tflops: float, hbm_tb_per_s: float) -> BatchSizeRecommendation:
    """Derive batch sizes from the roofline of a 16-bit matrix product.

    With B rows, a weight of two bytes is read once and used for 2·B FLOPs, so memory and compute
    take equally long at B = FLOP/s ÷ bytes/s. The optimal size is the next multiple of
    64 above it; the smallest useful one is the power of two at or below a quarter of that.
    """
    critical = round(peak_tflops / hbm_tb_per_s)
    optimal = (critical // _ROWS + 1) * _ROWS
    return BatchSizeRecommendation(
        min_batch_size=2 ** int(math.log2(optimal / 4)),
        optimal_batch_size=optimal,
        critical_batch_size=critical,
        notes=f"roofline: {peak_tflops:g} TFLOP/s ÷ {hbm_tb_per_s:g} TB/s",
    )


def is_local(text: str) -> bool:
    """Whether a hardware text stands for this machine, measured."""
    return plain_name(text) == LOCAL


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip that JAX reports as this ``device_kind``; None if it is not known.

    The whole text must match: a slice of a chip, or another form factor with other links, is not
    the chip whose name it contains.
    """
    wanted, chips = plain_name(device_kind), load_chips().values()
    return next((chip for chip in chips if wanted in map(plain_name, chip.device_kinds)), None)


def detect(devices: Sequence[Any] | None = None) -> Hardware | None:
    """Return the hardware of these devices (all by default); None if unknown or mixed.

    A node is a slice if JAX reports slices, else a process.
    """
    if devices is None:
        import jax

        devices = jax.devices()
    kinds = {device.device_kind for device in devices}
    chip = find_chip(kinds.pop()) if len(kinds) == 1 else None
    if chip is None:
        return None
    return Hardware(chip=chip, count=len(devices), nodes=len({_node(d) for d in devices}))


def parse_hardware(text: str) -> Hardware:
    """Parse ``8xA100-40GB`` (devices x chip), ``2x8xH100`` (nodes x devices x chip) or ``H200``.

    The numbers count JAX devices. Without a number of nodes, there are as few as fast links allow.
    """
    number = r"(?:([0-9]{1,7})\s*[x×]\s*)?"
    match = re.fullmatch(rf"{number}{number}(.+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError("the hardware is empty", fix="write it as 8xA100-40GB or 2x8xH100")
    only_numbers = re.fullmatch(r"[\d\sx×]+", match[3], re.IGNORECASE)
    # One of your own chips may be called X.
    if only_numbers and plain_name(match[3]) not in map(plain_name, load_chips()):
        numbers = text.strip(" xX×") or "8"
        raise UserError(
            f"`{text:.60}` names no chip",
            why="hardware is a number of devices and the chip that they are",
            fix=f"write it as {numbers:.20}xH100, with your chip's name",
        )
    _check_numbers(match[3], text)
    chip = chip_by_name(match[3])
    numbers = [int(digits) for digits in (match[1], match[2]) if digits] or [chip.devices_per_chip]
    if 0 in numbers:
        raise UserError(f"`{text}` has no devices", fix=f"write 1x{chip.name} or more")
    count = math.prod(numbers)
    _check_whole_chips(text, chip, numbers[-1])
    nodes = numbers[0] if len(numbers) == 2 else _fewest_nodes(text, chip, count)
    return Hardware(chip=chip, count=count, nodes=nodes)


def _check_numbers(rest: str, text: str) -> None:
    """Refuse a number of devices that is not a whole one, which would be read as a chip's name."""
    wrong = re.match(r"\s*([-+]?[\d.,_]+)\s*[x×]\s*\S", rest, re.IGNORECASE)
    if wrong:
        raise UserError(
            f"`{text:.60}` does not give a number of devices",
            why=f"`{wrong[1]:.20}` is not a whole number from 1 to 9,999,999, or a third number",
            fix="write it as 8xA100-40GB, or 2x8xH100 for two nodes",
        )


def chip_by_name(name: str) -> Chip:
    """Return the chip with this name, alias or JAX device kind."""
    wanted = plain_name(name)
    chips = load_chips()
    for chip in chips.values():
        if wanted in map(plain_name, (chip.name, *chip.aliases, *chip.device_kinds)):
            return chip
    variants = [chip.name for chip in chips.values() if plain_name(chip.family) == wanted]
    if variants:
        raise UserError(
            f"`{name}` comes in several sizes", fix=f"write {' or '.join(variants)} instead"
        )
    spellings = {
        plain_name(s): c.name for c in chips.values() for s in (c.name, *c.aliases, c.family)
    }
    close = difflib.get_close_matches(wanted, spellings, n=5, cutoff=0.4)
    nearest = list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]
    raise UserError(
        f"unknown chip `{name}`",
        why=f"nearest: {', '.join(nearest)}" if nearest else "no chip has a similar name",
        fix=f"known chips: {', '.join(chips)}; your own file ({VARIABLE}) can add others",
    )


def _check_whole_chips(text: str, chip: Chip, devices: int) -> None:
    rest = devices % chip.devices_per_chip
    if rest:
        raise UserError(
            f"`{text}` is not a whole number of chips",
            why=f"devices are counted, and each {chip.name} is {chip.devices_per_chip} JAX devices",
            fix=f"write {devices - rest + chip.devices_per_chip} instead of {devices}",
        )


def _fewest_nodes(text: str, chip: Chip, count: int) -> int:
    domain = chip.devices_per_domain
    if domain is None or count <= domain:
        return 1
    if count % domain:
        nodes = math.ceil(count / domain)
        raise UserError(
            f"`{text}` does not fill its nodes",
            why=f"fast links join at most {domain} {chip.name} devices, and {count} is not a "
            f"multiple of {domain}",
            fix=f"write nodes x devices, such as {nodes}x{math.ceil(count / nodes)}x{chip.name}",
        )
    return count // domain


def _node(device: Any) -> int:
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else slice_index


@cache
def _table() -> dict[str, Any]:
    file = resources.files("meshwright.hardware") / "hardware.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _own_file() -> tuple[Path | None, int]:
    """Return the user's file and when it changed, so that a changed file is read again."""
    path = hardware_file()
    return path, path.stat().st_mtime_ns if path else 0


@cache
def _chips(path: Path | None, _changed: int) -> Mapping[str, Chip]:
    known: dict[str, dict[str, Any]] = _table()["chips"]
    rows = merge_chips(known, read_hardware_file(path)["chips"], path) if path else known
    chips = {
        name: _chip(name, row, "table" if row == known.get(name) else str(path))
        for name, row in rows.items()
    }
    _check_spellings(chips.values(), path)
    return MappingProxyType(chips)


@cache
def _links(path: Path | None, _changed: int) -> Mapping[str, Link]:
    own = read_hardware_file(path)["links"] if path else {}
    rows: dict[str, dict[str, Any]] = {**_table()["links"], **own}
    return MappingProxyType(
        {
            name: checked_row(Link, {"name": name, **row}, f"links.{name}", str(path))
            for name, row in rows.items()
        }
    )


def _chip(name: str, row: Mapping[str, Any], source: str) -> Chip:
    typical: Mapping[Any, Mapping[str, Any]] = _table()["typical"]
    given = {**typical.get(str(row.get("platform")), {}), **row}
    sizes = given.get("batch_sizes")
    if sizes and (not isinstance(sizes, dict) or set(sizes) != {"min", "optimal", "critical"}):
        raise UserError(
            f"chips.{name}.batch_sizes in {source} is {sizes!r:.60}",
            fix="write {min: …, optimal: …, critical: …}, or leave it out",
        )
    chip = checked_row(
        Chip,
        {
            "name": name,
            "family": plain_name(name),
            **given,
            "batch_sizes": _batch_sizes(sizes, "table") if sizes else unknown_batch_sizes(),
            "source": source,
        },
        f"chips.{name}",
        source,
    )
    derived = roofline_batch_sizes(chip.peak_tflops, chip.hbm_tb_per_s)
    return chip if sizes else replace(chip, batch_sizes=derived)


def _check_spellings(chips: Iterable[Chip], path: Path | None) -> None:
    """Refuse a spelling that two chips have: which one is meant would depend on their order."""
    owners: dict[str, str] = {}
    for chip in chips:
        for text in (chip.name, *chip.aliases, *chip.device_kinds):
            owner = owners.setdefault(plain_name(text), chip.name)
            if owner != chip.name:
                raise UserError(
                    f"`{text}` of chips.{chip.name} is already a name of {owner}",
                    why=f"in the hardware file {path}",
                    fix=f"leave it out, or change chips.{owner} itself",
                )


def _batch_sizes(row: Mapping[str, int], notes: str) -> BatchSizeRecommendation:
    return BatchSizeRecommendation(row["min"], row["optimal"], row["critical"], notes=notes)
