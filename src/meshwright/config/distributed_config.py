"""DistributedConfig: the processes of a run; missing values are inferred, and all are checked."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import Field

from meshwright.config.base import Frozen
from meshwright.config.batch import nearest_divisors
from meshwright.config.environment import read_environment
from meshwright.errors import UserError
from meshwright.mesh.axes import MESH_AXES, canonical_axis
from meshwright.text.units import counted, either

_PARALLEL = {
    canonical_axis(key.removesuffix("_parallel_size")): key
    for key in ("tensor_parallel_size", "pipeline_parallel_size")
}
"""By mesh axis, the field that sets its size."""
DEFAULT_AXIS_NAMES = ("data", *(MESH_AXES[axis].aliases[0] for axis in _PARALLEL))

Size = Annotated[int, Field(ge=1, le=2**20)]
"""A number of processes or nodes; more than a million is a typo."""


class DistributedBackend(StrEnum):
    """Communication libraries; each member equals its text, as in ``backend="nccl"``."""

    NCCL = "nccl"
    GLOO = "gloo"
    MPI = "mpi"


class MeshDescription(TypedDict):
    """The sizes of the mesh axes and their names."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]


class DistributedConfig(Frozen):
    """The processes of a run and the grid they form; one device belongs to each process.

    Values that are not given are inferred from those that are, so that always
    ``world_size = num_nodes × num_processes_per_node = product of mesh_shape`` and
    ``tensor_parallel_size × pipeline_parallel_size`` divides ``world_size``.

    Attributes:
        name: a name for this config.
        description: free text.
        tags: words to search for.
        metadata: anything else to record with it.
        enabled: whether several processes are used; inferred from ``world_size``.
        world_size: number of processes in the run.
        backend: the communication library of the platform: nccl, gloo or mpi.
        rank: this process among all, from 0.
        local_rank: this process among those of its node, from 0.
        num_nodes: number of machines.
        num_processes_per_node: processes on each machine.
        master_addr: address of process 0, to which all others connect.
        master_port: its port, 1024 to 65535.
        tensor_parallel_size: processes that shard each layer.
        pipeline_parallel_size: number of pipeline stages.
        mesh_shape: sizes of the mesh axes.
        mesh_axis_names: their names; aliases such as ``model`` and ``pipeline`` stay as they are.
        find_unused_parameters: has no effect; a compiled step has a gradient for every parameter,
            zero if the loss does not use it. This and the next two are options of PyTorch's
            DistributedDataParallel, accepted so that configs can be shared.
        gradient_as_bucket_view: has no effect; the compiler decides how gradients are combined.
        broadcast_buffers: has no effect; state such as batch statistics is the same everywhere.
        mixed_precision: no, fp16 or bf16.
    """

    name: str = Field(default="distributed_config", min_length=1)
    description: str = ""
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)
    enabled: bool = False
    world_size: Size = 1
    backend: DistributedBackend = DistributedBackend.NCCL
    rank: int = Field(default=0, ge=0)
    local_rank: int = Field(default=0, ge=0)
    num_nodes: Size = 1
    num_processes_per_node: Size = 1
    master_addr: str = Field(default="localhost", min_length=1)
    master_port: int = Field(default=29500, ge=1024, le=65535)
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    mesh_shape: tuple[Size, ...] = Field(default=(1,), min_length=1)
    mesh_axis_names: tuple[str, ...] = Field(default=("data",), min_length=1)
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        given = {k: v for k, v in values.items() if v is not None or k not in fields}
        # The first pass checks each value by itself, so that inference starts from valid ones.
        super().__init__(**given)
        super().__init__(**_infer({key: getattr(self, key) for key in given}))
        _check(self, set(given))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **values: Any) -> Self:
        """Read MASTER_ADDR, RANK, … or what SLURM, MPI, JAX, … set; ``values`` override."""
        inferred = read_environment(os.environ if environ is None else environ, values)
        return cls(**{**inferred, **values})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config of what `to_dict` returned, or of any of its keys."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, inferred ones too, as JSON has them."""
        return self.model_dump(mode="json")

    def get_data_parallel_size(self) -> int:
        """Return how many copies of the model work on different data."""
        return self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    def is_main_process(self) -> bool:
        """Whether this is the first process of the run."""
        return self.rank == 0

    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    def mesh_sizes(self) -> dict[str, int]:
        """Return the mesh as axis names and sizes."""
        return dict(zip(self.mesh_axis_names, self.mesh_shape, strict=True))

    def get_mesh_config(self) -> MeshDescription:
        """Return the mesh as ``{"mesh_shape": (4, 2), "axis_names": ("data", "model")}``."""
        return {"mesh_shape": self.mesh_shape, "axis_names": self.mesh_axis_names}


def _infer(given: dict[str, Any]) -> dict[str, Any]:
    values = dict(given)
    if "mesh_shape" in values:
        _infer_from_mesh(values)
    _infer_processes(values)
    if "mesh_shape" not in values:
        _infer_mesh(values)
    values.setdefault("enabled", values["world_size"] > 1)
    values.setdefault("local_rank", values.get("rank", 0) % values["num_processes_per_node"])
    return values


def _infer_from_mesh(values: dict[str, Any]) -> None:
    """Infer the tensor and pipeline sizes from a given mesh_shape."""
    shape = values["mesh_shape"]
    names = values.setdefault("mesh_axis_names", DEFAULT_AXIS_NAMES[: len(shape)])
    if len(names) != len(shape):
        raise UserError(
            f"mesh_axis_names={names} and mesh_shape={shape} have different lengths",
            why=f"there are {counted(len(names), 'name')} and {counted(len(shape), 'size')}",
            fix=f"write one name per size: {min(len(shape), 4)} of data, fsdp, model, pipeline",
        )
    sizes = dict(zip(_axes(names), shape, strict=True))
    for axis, key in _PARALLEL.items():
        size = sizes.get(axis, 1)
        if values.setdefault(key, size) != size:
            raise UserError(
                f"{key}={values[key]} contradicts mesh_shape={shape}",
                why=f"with mesh_axis_names={names} the {axis} axis has size {size}",
                fix=f"write {key}={size} or leave it out, or give the mesh a {axis} axis of "
                f"size {values[key]}",
            )


def _infer_processes(values: dict[str, Any]) -> None:
    nodes, per_node = values.get("num_nodes"), values.get("num_processes_per_node")
    if "world_size" not in values:
        if nodes and per_node:
            values["world_size"] = nodes * per_node
        elif "mesh_shape" in values:
            values["world_size"] = math.prod(values["mesh_shape"])
        else:
            # The smallest number of processes for one model replica, in whole nodes.
            parallel = math.prod(values.get(key, 1) for key in _PARALLEL.values())
            values["world_size"] = math.lcm(parallel, nodes or per_node or 1)
    world = values["world_size"]
    if nodes is None and per_node is None:
        values["num_nodes"], values["num_processes_per_node"] = 1, world
    elif per_node is None:
        values["num_processes_per_node"] = max(world // values["num_nodes"], 1)
    elif nodes is None:
        values["num_nodes"] = max(world // per_node, 1)


def _infer_mesh(values: dict[str, Any]) -> None:
    """Give every named axis its size; without names, those axes that are larger than 1."""
    sizes = {axis: values[key] for axis, key in _PARALLEL.items() if key in values}
    names = values.get("mesh_axis_names")
    if names is None:
        larger = (axis for axis, size in sizes.items() if size > 1)
        names = ("data", *(MESH_AXES[axis].aliases[0] for axis in larger))
    axes = _axes(names)
    left, remainder = divmod(values["world_size"], math.prod(sizes.values()))
    # The remaining processes go to the first other axis, or to tensor or pipe if it has no size.
    free = sorted((axis for axis in axes if axis not in sizes), key=lambda axis: axis in _PARALLEL)
    needed = {"data": 1 if free or remainder else left, **sizes}
    for axis, size in needed.items():
        if axis not in axes and size > 1:
            raise UserError(
                f"mesh_axis_names={names} has no {axis} axis",
                why=f"world_size={values['world_size']} needs {axis}={size}",
                fix=f"add an axis: mesh_axis_names={(*names, axis)}",
            )
    sizes |= {axis: max(left, 1) for axis in free[:1]}
    values["mesh_axis_names"] = names
    values["mesh_shape"] = tuple(sizes.get(axis, 1) for axis in axes)
    values |= {key: sizes.get(axis, 1) for axis, key in _PARALLEL.items()}


def _axes(names: Sequence[str]) -> list[str]:
    axes = [canonical_axis(name) for name in names]
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice:
        raise UserError(
            f"mesh_axis_names={tuple(names)} names the {twice} axis twice",
            fix="write each of data, fsdp, model, pipeline at most once",
        )
    return axes


def _check(c: DistributedConfig, written: Collection[str]) -> None:
    """Check all equations; messages name the values that were written, not inferred ones."""
    if c.local_rank >= c.num_processes_per_node:
        raise UserError(
            f"local_rank={c.local_rank} does not exist",
            why=f"num_processes_per_node={c.num_processes_per_node}, and "
            "local_rank < num_processes_per_node",
            fix=f"write local_rank={_up_to(c.num_processes_per_node - 1)}, or "
            f"num_processes_per_node={c.local_rank + 1} or more",
        )
    if c.world_size != c.num_nodes * c.num_processes_per_node:
        raise _uneven_nodes(c, written)
    if c.rank >= c.world_size:
        raise UserError(
            f"rank={c.rank} does not exist",
            why=f"world_size={c.world_size}, and rank < world_size",
            fix=f"write rank={_up_to(c.world_size - 1)}, or world_size={c.rank + 1} or more",
        )
    if "mesh_shape" in written:
        # The parallel sizes are inferred from a given mesh, and would only repeat its mistake.
        _check_mesh(c, written)
    _check_parallel(c)


def _check_mesh(c: DistributedConfig, written: Collection[str]) -> None:
    product = math.prod(c.mesh_shape)
    if product == c.world_size:
        return
    nodes = f"num_nodes={c.num_nodes} × num_processes_per_node={c.num_processes_per_node}"
    world = f"world_size={c.world_size}" if "world_size" in written else nodes
    raise UserError(
        f"mesh_shape={c.mesh_shape} contradicts {world}",
        why=f"mesh_shape={c.mesh_shape} has {' × '.join(map(str, c.mesh_shape))} = {product} "
        f"devices, not {c.world_size}",
        fix=f"write world_size={product} or mesh_shape={_nearest_shape(c)}"
        if "world_size" in written
        else f"write mesh_shape={_nearest_shape(c)}",
    )


def _uneven_nodes(c: DistributedConfig, written: Collection[str]) -> UserError:
    product = c.num_nodes * c.num_processes_per_node
    if c.world_size % c.num_nodes == 0:
        other = f"num_processes_per_node={c.world_size // c.num_nodes}"
    else:
        other = f"num_nodes={either(nearest_divisors(c.world_size, c.num_nodes))}"
    whole = "mesh_shape" if "world_size" not in written else "world_size"
    parts = [key for key in ("num_nodes", "num_processes_per_node") if key in written]
    return UserError(
        f"{whole}={getattr(c, whole)} contradicts "
        + " and ".join(f"{key}={getattr(c, key)}" for key in parts),
        why=f"num_nodes={c.num_nodes} × num_processes_per_node={c.num_processes_per_node} "
        f"= {product}, not {c.world_size}",
        fix=f"write world_size={product} or {other}, or leave one of the three out and it is "
        "inferred",
    )


def _check_parallel(c: DistributedConfig) -> None:
    tensor, pipe = c.tensor_parallel_size, c.pipeline_parallel_size
    if c.world_size % (tensor * pipe) == 0:
        return
    raise UserError(
        f"tensor_parallel_size={tensor} and pipeline_parallel_size={pipe} do not fit "
        f"world_size={c.world_size}",
        why=f"{c.world_size} is not divisible by {tensor} × {pipe} = {tensor * pipe}",
        fix="choose sizes whose product is "
        f"{either(nearest_divisors(c.world_size, tensor * pipe))}",
    )


def _nearest_shape(c: DistributedConfig) -> tuple[int, ...]:
    """Return a shape for the world size that changes one axis, the first possible, if any."""
    for place, size in enumerate(c.mesh_shape):
        others = math.prod(c.mesh_shape) // size
        if c.world_size % others == 0:
            return (*c.mesh_shape[:place], c.world_size // others, *c.mesh_shape[place + 1 :])
    return (c.world_size, *(1 for _ in c.mesh_shape[1:]))


def _up_to(last: int) -> str:
    return f"0 to {last}" if last else "0"
