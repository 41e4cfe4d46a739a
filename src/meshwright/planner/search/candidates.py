"""What a search chooses from: meshes of a number of devices, batch sizes, and other settings."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from meshwright.config.batch import DEFAULT_MICRO_BATCH_SIZE, Batch
from meshwright.config.schema import Config, KernelChoice, Precision, Remat, ShardingConfig
from meshwright.errors import Setting
from meshwright.hardware import MEMORY_SHARE, Hardware
from meshwright.mesh.axes import AXES, BATCH_AXES, CONTEXT, INFER, divisors, shown_sizes
from meshwright.plan import Plan, mesh_sizes, precision, resolve_mesh
from meshwright.text.units import counted

REMATS: tuple[Remat, ...] = ("none", "dots", "full")
"""From the fastest to the smallest."""
SCHEDULES = ("1f1b", "zb_h1", "interleaved")
MOST_UNROLLED = 32
"""Blocks up to which running them one by one is considered: it takes long to compile."""

Sizes = Mapping[str, int]
"""The size of every axis, 1 included."""


@dataclass(frozen=True)
class FixedSettings:
    """What the user has set, such as sizes of some axes; None leaves it to the search."""

    mesh: Sizes = field(default_factory=lambda: MappingProxyType(dict[str, int]()))
    remat: Remat | None = None
    blocks: Literal["scan", "unroll"] | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    sync_gradients_every: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None


@dataclass(frozen=True)
class PlanTask:
    """What is to be planned: a step of some samples on some hardware.

    What is in ``sharding`` but not in ``fixed`` is the same in every plan. A plan may take
    ``memory_share`` of a device's memory.
    """

    hardware: Hardware
    global_batch_size: int
    fixed: FixedSettings = field(default_factory=FixedSettings)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    precision: Precision = "bf16"
    matmul: str = "default"
    kernels: KernelChoice = "auto"
    memory_share: float = MEMORY_SHARE

    def replicas_batch(self, sizes: Sizes) -> int:
        """Return the samples of one replica and step; 0 if they cannot be divided."""
        replicas = sizes["data"] * sizes["fsdp"]
        return 0 if self.global_batch_size % replicas else self.global_batch_size // replicas


@dataclass(frozen=True)
class Variant:
    """Settings besides mesh and microbatch; ``sync_once`` reduces gradients once per step."""

    remat: Remat = "none"
    blocks: Literal["scan", "unroll"] = "unroll"
    sync_once: bool = False
    schedule: str | None = None
    num_chunks: int = 1


LONG_ROWS = 8192
"""Rows of fewer tokens are not divided: attention sends more than it saves."""


def all_sizes(num_devices: int, fixed: Sizes, *, tokens: int = 0) -> Iterator[dict[str, int]]:
    """Yield every mesh of this many devices with the fixed sizes, in canonical order of axes.

    Only rows of many ``tokens`` are divided.
    """
    if tokens < LONG_ROWS:
        fixed = {CONTEXT: 1, **fixed}
    choices = {axis: [fixed[axis]] if axis in fixed else divisors(num_devices) for axis in AXES}
    first, *others = AXES
    for sizes in product(*(choices[axis] for axis in others)):
        rest, left = divmod(num_devices, math.prod(sizes))
        if not left and rest in choices[first]:
            yield dict(zip(AXES, (rest, *sizes), strict=True))


def reduces_once(task: PlanTask, sizes: Sizes) -> bool:
    """Whether gradients can wait for the last microbatch: a device needs room for whole ones."""
    return sizes.get(CONTEXT, 1) == 1 and (sizes["fsdp"] == 1 or task.sharding.zero == 1)


def micro_batch_sizes(task: PlanTask, sizes: Sizes, variant: Variant) -> list[int]:
    """Return the microbatch sizes that divide the batch on this mesh, the smallest first."""
    own = task.replicas_batch(sizes)
    return [size for size in divisors(own) if _allowed(own // size, size, task, sizes, variant)]


def _allowed(steps: int, micro: int, task: PlanTask, sizes: Sizes, variant: Variant) -> bool:
    """Whether a step may have this many microbatches of this size."""
    fixed = task.fixed
    if micro != (fixed.micro_batch_size or micro):
        return False
    if steps != (fixed.gradient_accumulation_steps or steps):
        return False
    sync = fixed.sync_gradients_every or 1
    if steps % sync or (sizes["pipe"] > 1 and sync not in (1, steps)):
        return False
    if sync > 1 and not reduces_once(task, sizes):
        return False
    if sizes["pipe"] == 1:
        return True
    flushed = fixed.num_microbatches or steps
    return steps % flushed == 0 and flushed % (sizes["pipe"] if variant.num_chunks > 1 else 1) == 0


def first_variants(task: PlanTask, sizes: Sizes, num_blocks: int) -> list[Variant]:
    """Return the choices of remat, the fastest first.

    Repeated blocks are a scan here: a scan is traced once for all of them. Whether they should run
    one by one is decided for the best plan.
    """
    fixed = task.fixed
    # On CPUs no memory is predicted that recomputing would save.
    saves = num_blocks and task.hardware.chip.platform != "cpu"
    remats = (fixed.remat,) if fixed.remat else REMATS if saves else REMATS[:1]
    blocks = fixed.blocks or ("scan" if num_blocks else "unroll")
    schedule, chunks = next(iter(schedule_choices(task, sizes, num_blocks)), (None, 1))
    return [Variant(remat, blocks, schedule=schedule, num_chunks=chunks) for remat in remats]


def schedule_choices(task: PlanTask, sizes: Sizes, num_blocks: int) -> list[tuple[str, int]]:
    """Return the pipeline schedules that this mesh can use, with their chunks."""
    if sizes["pipe"] == 1:
        return []
    fixed = task.fixed
    chunks = fixed.num_chunks or 2
    names = [fixed.schedule] if fixed.schedule else list(SCHEDULES)
    found = [(name, chunks if name == "interleaved" else 1) for name in names]
    fitting = [choice for choice in found if sizes["pipe"] * choice[1] <= num_blocks]
    return fitting or found[:1]


def make_candidate(task: PlanTask, sizes: Sizes, variant: Variant, micro: int) -> Plan:
    """Return the plan with this mesh, these settings and this microbatch size."""
    replicas, fixed = sizes["data"] * sizes["fsdp"], task.fixed
    steps = task.replicas_batch(sizes) // micro
    stages = sizes["pipe"] > 1
    return Plan(
        mesh=shown_sizes(sizes),
        batch=Batch(
            global_batch_size=task.global_batch_size,
            micro_batch_size=micro,
            replicas=replicas,
            gradient_accumulation_steps=steps,
            sync_gradients_every=fixed.sync_gradients_every or (steps if variant.sync_once else 1),
        ),
        sharding=task.sharding.model_copy(
            update={"remat": variant.remat, "blocks": variant.blocks}
        ),
        schedule=variant.schedule,
        num_microbatches=(fixed.num_microbatches or steps) if stages else 1,
        num_chunks=variant.num_chunks if stages else 1,
        precision=task.precision,
        matmul=task.matmul,
        kernels=task.kernels,
    )


def config_task(
    config: Config,
    decided: Collection[str],
    hardware: Hardware,
    *,
    memory_share: float = MEMORY_SHARE,
) -> tuple[PlanTask, list[str]]:
    """Return what to plan for a config, keeping the ``decided`` keys, and what was assumed."""
    fixed = _fixed(config, decided, hardware.count)
    batch, remarks = _global_batch(config, fixed, hardware.count)
    task = PlanTask(
        hardware=hardware,
        global_batch_size=batch,
        fixed=fixed,
        sharding=config.sharding,
        precision=precision(config),
        matmul=config.precision.matmul,
        kernels=config.kernels,
        memory_share=memory_share,
    )
    return task, remarks


def _fixed(config: Config, decided: Collection[str], num_devices: int) -> FixedSettings:
    training, sharding, pipeline = config.training, config.sharding, config.pipeline

    def decided_value(key: str, value: Any) -> Any:
        return value if key in decided else None

    return FixedSettings(
        mesh=_fixed_mesh(config, decided, num_devices),
        remat=decided_value("sharding.remat", sharding.remat),
        blocks=decided_value("sharding.blocks", sharding.blocks),
        micro_batch_size=None if training.micro_batch_size == "auto" else training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        sync_gradients_every=decided_value(
            "training.sync_gradients_every", training.sync_gradients_every
        ),
        schedule=decided_value("pipeline.schedule", pipeline.schedule),
        num_microbatches=pipeline.num_microbatches,
        num_chunks=decided_value("pipeline.num_chunks", pipeline.num_chunks),
    )


def _fixed_mesh(config: Config, decided: Collection[str], num_devices: int) -> Mapping[str, int]:
    """Return the sizes of axes that are given; a size of -1 says that the whole mesh is."""
    asked = mesh_sizes(config)
    given = {axis: asked[axis] for axis in AXES if f"mesh.{axis}" in decided}
    if config.model.mesh_shape is not None:
        given = asked
    if INFER not in given.values():
        return given
    return dict.fromkeys(AXES, 1) | resolve_mesh(asked, num_devices)


def _global_batch(config: Config, fixed: FixedSettings, num_devices: int) -> tuple[int, list[str]]:
    """Return the samples of a step: given, or as many as plain data parallelism would take."""
    given = config.training.global_batch_size
    if given is not None:
        return given, []
    others = math.prod(fixed.mesh.get(axis, 1) for axis in AXES if axis not in BATCH_AXES)
    replicas = max(1, num_devices // others)
    micro = fixed.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
    batch = micro * replicas * (fixed.gradient_accumulation_steps or 1)
    each = counted(micro, "sample")
    setting = Setting("training.global_batch_size")
    return batch, [f"{setting} is not set; this is for {batch} samples, {each} per device"]
