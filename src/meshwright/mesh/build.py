"""Building meshes: which device has which coordinate, with fast links innermost."""

import math
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.errors import UserError, did_you_mean
from meshwright.mesh.axes import AXES, INFER, check_sizes, is_whole, resolve_alias, resolve_sizes

Device = Any
"""A `jax.Device`, or an object with the same attributes."""


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Device] | None = None) -> Mesh:
    """Build a mesh with the axes of `AXES` over ``devices`` (all of them by default).

    One size may be -1, and ``data`` takes the remaining devices if it is not given. Axes are
    ordered pipe, data, context, fsdp, tensor and have Auto type; axes of size 1 stay if given. An
    axis given by an alias, such as ``model``, keeps this name.
    """
    check_devices(devices)
    present = list(jax.devices() if devices is None else devices)
    return arrange_mesh(_as_named(resolve_sizes(sizes, len(present)), sizes), present)


def arrange_mesh(sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """Build a mesh with exactly these axis names, in this order, over exactly these devices."""
    check_same_kind(devices)
    grid = device_grid(tuple(sizes), tuple(sizes.values()), devices)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(sizes: Mapping[str, int], num_devices: int | None = None) -> AbstractMesh:
    """Describe a mesh without devices, for planning and for drawing (1024 devices are fine)."""
    check_sizes(sizes)
    if num_devices is None:
        if INFER in sizes.values():
            raise UserError(
                "the mesh has a size to infer, but the number of devices is not given",
                fix="pass num_devices=, or write every size",
            )
        num_devices = math.prod(sizes.values())
    elif not is_whole(num_devices):
        raise UserError(
            f"num_devices={num_devices!r:.60} is not valid",
            why=f"it is of type {type(num_devices).__name__}",
            fix="write a whole number, 1 or more",
        )
    resolved = _as_named(resolve_sizes(sizes, num_devices), sizes)
    return AbstractMesh(
        tuple(resolved.values()), tuple(resolved), axis_types=(AxisType.Auto,) * len(resolved)
    )


def _as_named(resolved: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return resolved sizes under the names that were given, aliases included."""
    names = {resolve_alias(name): name for name in sizes}
    return {names.get(axis, axis): size for axis, size in resolved.items()}


def device_grid(
    names: Sequence[str], shape: Sequence[int], devices: Sequence[Device]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Place devices on a grid so that inner axes get the fastest links.

    Axes are laid out from the outermost in the order pipe, data, context, fsdp, tensor (other names
    count as data), then transposed to the order of ``names``.
    """
    axes = [resolve_alias(name) for name in names]
    # Any other name is placed like `data`: outside the axes that need fast links.
    ranks = [AXES.index(axis if axis in AXES else "data") for axis in axes]
    order = sorted(range(len(names)), key=lambda i: ranks[i])
    grid = _topology_grid([shape[i] for i in order], devices)
    return grid.transpose([order.index(i) for i in range(len(names))])


def check_devices(devices: object) -> None:
    """Refuse what is neither None nor a sequence of devices."""
    if devices is None:
        return
    listed = isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str | bytes)
    each: list[Any] = list(typing.cast(Sequence[Any], devices)) if listed else []
    if not each or not all(hasattr(device, "device_kind") for device in each):
        raise UserError(
            f"devices={devices!r:.60} is not a list of devices",
            why=f"it is of type {type(devices).__name__}" if not listed else "",
            fix="write one such as jax.devices()[:4], or leave it out to use all",
        )


def check_mesh_axis(mesh: Mesh, axis: str, fix: str = "") -> None:
    """Refuse an axis name that the mesh does not have; ``fix`` says what to do without a hint."""
    if axis not in mesh.axis_names:
        names = [str(name) for name in mesh.axis_names]
        raise UserError(
            f"the mesh has no axis `{axis}`",
            why=f"its axes are {', '.join(names)}",
            fix=did_you_mean(axis, names) or fix,
        )


def check_same_kind(devices: Sequence[Device]) -> None:
    """Refuse a mesh of different kinds of device, which would run at the pace of the slowest."""
    kinds = Counter[str](device.device_kind for device in devices)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))
        largest = max(kinds, key=lambda kind: kinds[kind])
        raise UserError(
            "the devices are not of one kind",
            why=f"found {counts}; a mesh runs at the pace of its slowest device",
            fix="use machines of one kind, or pass devices= with only the "
            f"{kinds[largest]} {largest}",
        )


def _topology_grid(
    shape: Sequence[int], devices: Sequence[Device]
) -> np.ndarray[Any, np.dtype[Any]]:
    # Groups with fast links: TPU slices, or the devices of a process.
    slices = [getattr(device, "slice_index", None) for device in devices]
    groups = [d.process_index if s is None else s for d, s in zip(devices, slices, strict=True)]
    sizes = {groups.count(group) for group in groups}
    across = split_across(shape, len(set(groups)))
    is_tpu = bool(devices) and devices[0].platform == "tpu"
    if len(set(groups)) > 1 and across is not None and len(sizes) == 1 and across[-1] == 1:
        return mesh_utils.create_hybrid_device_mesh(
            [size // outer for size, outer in zip(shape, across, strict=True)],
            across,
            devices=devices,
            process_is_granule=None in slices,
            allow_split_physical_axes=is_tpu,
        )
    if len(set(groups)) == 1 and is_tpu:
        # Only a TPU torus has an order better than device ids within one slice.
        return mesh_utils.create_device_mesh(
            tuple(shape), devices=devices, allow_split_physical_axes=True
        )
    # There is one group, or the axes do not align with the groups, or only if the innermost one is
    # split: keeping the devices of each process adjacent crosses machines least.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.array(ordered, dtype=object).reshape(tuple(shape))


def split_across(shape: Sequence[int], granules: int) -> list[int] | None:
    """Split ``granules`` machines over the axes, outermost first; None when they do not divide."""
    across: list[int] = []
    left = granules
    for size in shape:
        share = math.gcd(size, left)
        across.append(share)
        left //= share
    return across if left == 1 else None
