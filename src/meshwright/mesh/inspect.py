"""Showing how arrays are sharded: one array, or every array of a tree, a model or a state."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from meshwright.mesh.axes import describe_sizes
from meshwright.mesh.picture import device_numbers, id_ranges
from meshwright.mesh.terminal_drawing import render_mesh
from meshwright.text.columns import Columns, stream_width
from meshwright.text.units import counted


@dataclass(frozen=True)
class ShardingRecord:
    """How one array is sharded.

    Attributes:
        path: the name given to the array, or its path within the tree.
        shape: the global shape.
        dtype: the element type.
        spec: ``P('fsdp', None)`` on a mesh; ``one device``; ``host`` outside JAX; ``not placed``
            for a ``ShapeDtypeStruct`` without a sharding.
        mesh: the axes of its mesh; empty without one.
        devices: ids of the devices that hold a part of it; empty outside JAX.
        shard_shape: the shape of the part one device holds.
        bytes_per_device: the size of that part.
        replicas: number of devices with the same part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    mesh: str
    devices: tuple[int, ...]
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    replicas: int

    @property
    def total_bytes(self) -> int:
        """The size of the whole array, counted once."""
        parts = math.prod(self.shape) // max(math.prod(self.shard_shape), 1)
        return self.bytes_per_device * parts


def inspect_sharding(
    array: Any, name: str = "array"
) -> ShardingRecord | tuple[ShardingRecord, ...]:
    """Print how an array is sharded and return a record; for a tree, one record per array.

    Args:
        array: a JAX or NumPy array, a Python number, a ``ShapeDtypeStruct``, or any tree of them,
            NNX models, variables and states included.
        name: its name in the output.
    """
    leaves = _named_leaves(array)
    if len(leaves) == 1 and not leaves[0][0]:
        record = _record(name, leaves[0][1])
        _console().print(_one(record))
        return record
    records = tuple(_record(path, leaf) for path, leaf in leaves)
    _console().print(_many(name, records))
    return records


def visualize_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Print a drawing of a mesh."""
    _console().print(render_mesh(mesh))


def _console() -> Console:
    return Console(width=stream_width(sys.stdout))


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    if _is_flax(tree, "Module"):
        # The state lists a weight that the model uses twice only once.
        tree = sys.modules["flax.nnx"].state(tree)
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: _is_flax(node, "Variable")
    )
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="."),
            jax.tree.leaves(leaf)[0] if _is_flax(leaf, "Variable") else leaf,
        )
        for path, leaf in leaves
    ]


def _is_flax(value: Any, kind: str) -> bool:
    """Whether a value is an instance of an NNX class, without importing Flax to find out."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, getattr(nnx, kind))


def _record(path: str, leaf: Any) -> ShardingRecord:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        leaf = np.asarray(leaf)
    shape = tuple(int(size) for size in leaf.shape)
    sharding = getattr(leaf, "sharding", None)
    shard_shape = shape if sharding is None else tuple(sharding.shard_shape(shape))
    devices = () if sharding is None else _device_ids(sharding)
    # Shards are equal in size, so the number of distinct ones follows from the shapes.
    parts = math.prod(-(-a // b) if b else 1 for a, b in zip(shape, shard_shape, strict=True))
    return ShardingRecord(
        path=path,
        shape=shape,
        dtype=str(leaf.dtype),
        spec=_spec(leaf, sharding),
        mesh=describe_sizes(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else "",
        devices=devices,
        shard_shape=shard_shape,
        bytes_per_device=math.prod(shard_shape) * leaf.dtype.itemsize,
        replicas=max(len(devices), 1) // parts or 1,
    )


def _device_ids(sharding: jax.sharding.Sharding) -> tuple[int, ...]:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return tuple(range(sharding.mesh.size))
    return tuple(sorted(device_numbers(list(sharding.device_set))))


def _spec(leaf: Any, sharding: jax.sharding.Sharding | None) -> str:
    if sharding is None:
        return "not placed" if isinstance(leaf, jax.ShapeDtypeStruct) else "host"
    if isinstance(sharding, NamedSharding):
        return f"P({', '.join(map(repr, sharding.spec))})"
    return "one device" if len(sharding.device_set) == 1 else type(sharding).__name__


def _one(record: ShardingRecord) -> RenderableType:
    title = Text(record.path, "bold").append(f"  {record.dtype}{list(record.shape)}", "not bold")
    title.append(f" · {decimal(record.total_bytes)}", "not bold")
    table = Table.grid("", "", padding=(0, 2))
    table.add_row("  layout", f"{record.spec} on {record.mesh}" if record.mesh else record.spec)
    if record.devices:
        parts, copies = len(record.devices) // record.replicas, record.replicas
        split = f"{counted(parts, 'part')}, {counted(copies, 'copy', 'copies')} each"
        holds = f"{list(record.shard_shape)}, {decimal(record.bytes_per_device)}"
        table.add_row("  devices", f"{len(record.devices)} ({id_ranges(record.devices)}): {split}")
        table.add_row("  one holds", holds)
    return Group(title, table)


def _many(name: str, records: tuple[ShardingRecord, ...]) -> RenderableType:
    rows = [
        (
            r.path,
            f"{r.dtype}[{','.join(map(str, r.shape))}]",
            r.spec,
            decimal(r.bytes_per_device),
            str(r.replicas),
        )
        for r in records
    ]
    head = ("path", "array", "layout", "per device", "copies")
    table = Columns(head, rows, right=("per device", "copies"))
    total = decimal(sum(r.total_bytes for r in records))
    held = decimal(sum(r.bytes_per_device for r in records if r.devices))
    summary = f"{counted(len(records), 'array')}: {total} in all, at most {held} on one device"
    return Group(Text(name, "bold"), table, Text(summary, "dim"))
