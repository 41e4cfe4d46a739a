"""The table of mesh axes, and the arithmetic of their sizes."""

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import Setting, Spelling, UserError, current_spelling, did_you_mean
from meshwright.text.units import counted


@dataclass(frozen=True)
class Axis:
    """A mesh axis, by its name in settings, meshes and plans.

    Attributes:
        aliases: other names that are accepted; the first is the one `DistributedConfig` writes.
        place: its place in a mesh, from 0, the outermost, which gets the slowest links. The more
            an axis sends, the further inside it is.
        does: what it does, in words that follow ``fsdp=4``.
        splits_batch: whether its devices train on different samples.
        shards_model: whether its devices hold different parts of the model.
        remedy: what to try if devices wait too long for it; written when it is needed, as its
            reader spells settings.
    """

    name: str
    aliases: tuple[str, ...]
    place: int
    kind: str
    does: str
    sends: str
    splits_batch: bool = False
    shards_model: bool = True
    remedy: Callable[[], str] | None = None


MESH_AXES = {
    axis.name: axis
    for axis in (
        Axis(
            name="data",
            aliases=("dp",),
            place=1,
            kind="data parallel",
            does="trains copies of the model on different samples",
            sends="gradient reductions over data",
            splits_batch=True,
            shards_model=False,
            remedy=lambda: (
                f"more samples per step: {Setting('training.micro_batch_size')}, or "
                f"{Setting('training.gradient_accumulation_steps')} with "
                f"{Setting('training.sync_gradients_every')}"
            ),
        ),
        Axis(
            name="fsdp",
            aliases=(),
            place=3,
            kind="fully sharded",
            does="shards parameters, gradients and optimizer state",
            sends="gathering weights and reducing gradients over fsdp",
            splits_batch=True,
            remedy=lambda: (
                f"more samples per device ({Setting('training.micro_batch_size')}), or "
                f"{Setting('sharding.keep_gathered', True)} if the weights fit whole"
            ),
        ),
        Axis(
            name="tensor",
            aliases=("model", "tp", "mp"),
            place=4,
            kind="tensor parallel",
            does="shards every layer",
            sends="all-reduces inside layers over tensor",
            remedy=lambda: (
                f"less tensor parallelism (a smaller {Setting('mesh.tensor')}), or more samples "
                "per device"
            ),
        ),
        Axis(
            name="context",
            aliases=("cp", "sp"),
            place=2,
            kind="context parallel",
            does="divides the positions of each row",
            sends="exchanges of positions over context",
            shards_model=False,
            remedy=lambda: f"longer rows, or fewer parts of a row ({Setting('mesh.context')})",
        ),
        Axis(
            name="pipe",
            aliases=("pipeline", "pp"),
            place=0,
            kind="pipeline",
            does="divides the blocks into stages",
            sends="activations between stages",
        ),
    )
}
"""Every mesh axis by name, in the order in which people read about them.

No other module lists axes: a new one is added here, and as a key of ``mesh`` in the config.
"""

AXES = tuple(sorted(MESH_AXES, key=lambda name: MESH_AXES[name].place))
"""Names of axes from the slowest links (outermost) to the fastest (innermost)."""

BATCH_AXES = tuple(axis.name for axis in MESH_AXES.values() if axis.splits_batch)
"""Axes whose devices train on different samples."""

MODEL_AXES = tuple(axis.name for axis in MESH_AXES.values() if axis.shards_model)
"""Axes whose devices hold different parts of the model."""

PIPE = "pipe"
"""The axis of pipeline stages."""

TENSOR = "tensor"
"""The axis that divides the dims of weights."""

CONTEXT = "context"
"""The axis that divides the positions of rows."""

ROW_AXES = (*BATCH_AXES, CONTEXT)
"""Axes whose devices generate different rows, or train on different positions."""

ALIASES = {alias: axis.name for axis in MESH_AXES.values() for alias in axis.aliases}

INFER = -1
"""The size of an axis that takes the remaining devices."""


def resolve_alias(name: str) -> str:
    """Return the axis an alias stands for; any other name unchanged."""
    return ALIASES.get(name, name)


def canonical_axis(name: str) -> str:
    """Return the canonical name of an axis given by name or alias, and refuse any other."""
    axis = resolve_alias(name)
    if axis not in AXES:
        hint = did_you_mean(str(name), [*AXES, *ALIASES])
        raise UserError(
            f"unknown mesh axis `{name}`" + (f": {hint}" if hint else ""),
            why=f"the axes are {', '.join(sorted(AXES))}; "
            f"also accepted: {', '.join(f'{a} ({c})' for a, c in ALIASES.items())}",
        )
    return axis


def entry_names(entry: Any) -> tuple[str, ...]:
    """Return the axis names in one entry of a partition spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def is_whole(number: object) -> bool:
    """Whether this is an integer of Python or NumPy; booleans do not count."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def check_sizes(sizes: object) -> None:
    """Refuse anything but a mapping of whole numbers."""
    if not isinstance(sizes, Mapping):
        raise UserError(
            f"the mesh is {sizes!r:.60}, of type {type(sizes).__name__}",
            fix='write its axes and sizes, such as {"fsdp": 4, "tensor": 2}',
        )
    for name, size in typing.cast("Mapping[object, object]", sizes).items():
        if not is_whole(size):
            raise UserError(
                f"mesh axis `{name}` has size {size!r:.60}",
                why=f"it is of type {type(size).__name__}",
                fix=f"write a whole number, or {INFER} for the remaining devices",
            )


def canonical_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Rename axes to their canonical names, in canonical order, and check each size."""
    check_sizes(sizes)
    named: dict[str, int] = {}
    for name, size in sizes.items():
        axis = canonical_axis(name)
        if axis in named:
            raise UserError(f"mesh axis `{axis}` is given twice", fix=f"write it once: {axis}=…")
        if size != INFER and size < 1:
            raise UserError(
                f"mesh axis `{axis}` has size {size}",
                fix=f"write a size of 1 or more, or {axis}={INFER} for the remaining devices",
            )
        named[axis] = size
    return {axis: named[axis] for axis in AXES if axis in named}


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``"fsdp=4,tensor=2"``; empty text leaves all devices to ``data``."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, sign, size = (p.strip() for p in part.partition("="))
        if sign != "=" or not size.removeprefix("-").isdecimal():
            raise UserError(
                f"cannot read `{part}` in the mesh `{text}`",
                fix='write axis=size pairs, such as "fsdp=4,tensor=2"',
            )
        axis = canonical_axis(name)
        if axis in sizes:
            raise UserError(f"mesh axis `{name}` is given twice in `{text}`")
        sizes[axis] = int(size)
    return canonical_sizes(sizes)


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return sizes whose product is ``num_devices``, with at most one axis inferred.

    If no size is inferred and ``data`` is not given, ``data`` takes the remaining devices:
    ``{"fsdp": 4}`` on 8 devices is ``data=2 × fsdp=4``.
    """
    if num_devices < 1:
        raise UserError(f"a mesh needs at least one device, and there are {num_devices}")
    wanted = asked = canonical_sizes(sizes)
    unknown = [axis for axis, size in wanted.items() if size == INFER]
    if len(unknown) > 1:
        least = "data" if "data" in unknown else unknown[-1]
        raise UserError(
            f"{' and '.join(str(Setting(f'mesh.{a}')) for a in unknown)} are both {INFER}",
            why="only one axis can be inferred from the number of devices",
            fix=f"write a size for all but one, such as {Setting(f'mesh.{least}', 1)}",
        )
    if not unknown and "data" not in asked:
        wanted = canonical_sizes({**asked, "data": INFER})
        unknown = ["data"]
    known = math.prod(size for size in wanted.values() if size != INFER)
    if num_devices % known or (not unknown and known != num_devices):
        raise _mismatch(wanted, num_devices)
    resolved = {a: num_devices // known if s == INFER else s for a, s in wanted.items()}
    if "data" not in asked and resolved.get("data") == 1 and len(resolved) > 1:
        del resolved["data"]
    return resolved


def shown_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Drop axes of size 1, which have no effect."""
    return {axis: size for axis, size in sizes.items() if size != 1}


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return ``data=2 × fsdp=4`` for messages; ``1 device`` for one device."""
    return " × ".join(f"{axis}={size}" for axis, size in shown_sizes(sizes).items()) or "1 device"


def divisors(number: int) -> list[int]:
    """Return what divides a number, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_sizes(
    sizes: Mapping[str, int], num_devices: int, most: int = 3
) -> list[dict[str, int]]:
    """Return valid meshes for ``num_devices`` that change the asked sizes least.

    Distance is the sum of |log2| ratios per axis. ``data`` takes the remaining devices if it was
    not given.
    """
    asked = {axis: size for axis, size in sizes.items() if size not in (INFER, 1)} or {"data": 1}
    candidates: list[tuple[float, dict[str, int]]] = []

    def extend(axes: list[str], left: int, chosen: dict[str, int], distance: float) -> None:
        if not axes:
            if left == 1 or "data" not in asked:
                chosen = chosen if left == 1 else {"data": left, **chosen}
                candidates.append((distance + math.log2(left) / 2, chosen))
            return
        for size in divisors(left):
            step = abs(math.log2(size / asked[axes[0]]))
            extend(axes[1:], left // size, {**chosen, axes[0]: size}, distance + step)

    extend(list(asked), num_devices, {}, 0.0)
    candidates.sort(key=lambda pair: pair[0])
    return [canonical_sizes(shown_sizes(chosen)) for _, chosen in candidates[:most]]


def mesh_setting(sizes: Mapping[str, int]) -> str:
    """Return sizes as the reader would write them.

    That is ``mesh.fsdp=4 mesh.tensor=2`` on the command line, ``mesh="fsdp=4,tensor=2"`` in Python.
    """
    shown = shown_sizes(sizes) or {"data": 1}
    if current_spelling() is Spelling.PYTHON:
        return f'mesh="{",".join(f"{axis}={size}" for axis, size in shown.items())}"'
    return " ".join(str(Setting(f"mesh.{axis}", size)) for axis, size in shown.items())


def _mismatch(wanted: Mapping[str, int], num_devices: int) -> UserError:
    known = {axis: size for axis, size in wanted.items() if size != INFER}
    terms = {axis: size for axis, size in known.items() if size != 1} or {"data": 1}
    product = math.prod(known.values())
    factors = " × ".join(f"{axis}={size}" for axis, size in terms.items())
    equation = factors if len(terms) == 1 else f"{factors} = {product}"
    inferred = next((axis for axis, size in wanted.items() if size == INFER), None)
    relation = (
        f"which does not divide {num_devices}, so {inferred} cannot take the remaining devices"
        if inferred
        else f"not {num_devices}"
    )
    return UserError(
        f"the mesh does not match the {counted(num_devices, 'device')}",
        why=f"{equation}, {relation}",
        fix="nearest meshes that work: "
        + "; ".join(dict.fromkeys(map(mesh_setting, nearest_sizes(wanted, num_devices)))),
    )
